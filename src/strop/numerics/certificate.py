"""The certificate of a run: what its weights are, that the engine had the same, and that rollout and trainer agreed at every step.

A JSON file signed by its own digest. A third party checks it with ``verify_certificate``: signature, every tensor of the state on disk,
the chain of weight digests, and the statistics of every step against the metrics file. It fails closed: whatever can't be checked is wrong.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strop.core.errors import CheckpointError, NumericsError
from strop.numerics.canary import array_digest

if TYPE_CHECKING:
    from strop.store import Store

NAME = "certificate.json"
FORMAT = 1


def tensor_digests(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of every tensor of a (nested) trainer state by its path, for example ``optimizer/first/lm_head.weight``.

    Raises:
        NumericsError: A leaf that can't be hashed; nothing may stay out of the certificate.
    """
    digests: dict[str, str] = {}

    def walk(path: str, node: Any) -> None:
        if isinstance(node, Mapping):
            for key in sorted(node, key=str):
                walk(f"{path}/{key}" if path else str(key), node[key])
        elif hasattr(node, "detach"):
            digests[path] = array_digest(node.detach().cpu().numpy())
        elif isinstance(node, np.ndarray):
            digests[path] = array_digest(node)
        elif isinstance(node, (bool, int, float, str, bytes)) or node is None:
            digests[path] = hashlib.blake2b(repr(node).encode(), digest_size=32).hexdigest()
        else:
            raise NumericsError(f"certificate: {path} is a {type(node).__name__}, which can't be hashed")

    walk("", state)
    return digests


def exactness(metrics: list[dict[str, Any]]) -> dict[str, float]:
    """Return what the steps say about rollout against trainer: steps, tokens compared, worst figures over all steps.

    Args:
        metrics: Lines of ``metrics.jsonl`` of the RL phase.
    """

    def worst(key: str, start: float = 0.0) -> float:
        return max((float(record[key]) for record in metrics if key in record), default=start)

    compared = [record for record in metrics if record.get("numerics/tokens", 0) > 0]
    return {
        "steps": float(len(metrics)),
        "steps_compared": float(len(compared)),
        "tokens": float(sum(record["numerics/tokens"] for record in compared)),
        "is_exact": float(min((record.get("numerics/is_exact", 0.0) for record in compared), default=1.0)),
        "logprob_diff_max_nats": worst("numerics/logprob_diff_max_nats"),
        "k3_max_nats": worst("numerics/k3_nats"),
        "route_mismatch_max_frac": worst("numerics/route_mismatch_frac"),
        "nonfinite": worst("numerics/nonfinite"),
    }


def issue_certificate(
    path: str | Path,
    store: Store,
    *,
    state: Mapping[str, Any],
    sent_digest: str,
    loaded_digest: str,
    trainer_logprobs: np.ndarray | None = None,
    engine_logprobs: np.ndarray | None = None,
    mode: str = "exact",
    facts: Mapping[str, Any] | None = None,
    phase: str = "rl",
) -> dict[str, Any]:
    """Write the certificate of a finished phase.

    Args:
        path: The file.
        store: The run's store; its last commit of ``phase`` must hold ``state``.
        state: ``Trainer.state()``.
        sent_digest: ``weights_digest`` of the weights given to the engine last.
        loaded_digest: ``weights_digest`` of what the engine holds.
        trainer_logprobs: Canary of the trainer.
        engine_logprobs: Canary of the engine, same streams.
        mode: ``numerics.mode`` of the run.
        facts: Revision, versions and machine (``RunDir.facts``).
        phase: Phase of the commits.

    Returns:
        The body.

    Raises:
        NumericsError: The engine's weights or its canary differ from the trainer's, or an exact run was not exact. No file is written.
    """
    statistics = exactness(store.metrics(phase=phase))
    if sent_digest != loaded_digest:
        raise NumericsError(f"certificate refused: weights sent have the digest {sent_digest}, the engine holds {loaded_digest}")
    canary = _canary(trainer_logprobs, engine_logprobs, mode)
    if mode == "exact" and statistics["is_exact"] != 1.0:
        raise NumericsError(f"certificate refused: an exact run had a largest difference of {statistics['logprob_diff_max_nats']:g} nats")
    commits = store.commits(phase=phase)
    body: dict[str, Any] = {
        "format": FORMAT,
        "phase": phase,
        "mode": mode,
        "tensors": tensor_digests(state),
        "engine": {"sent": sent_digest, "loaded": loaded_digest},
        "canary": canary,
        "exactness": statistics,
        "chain": [[commit.step, commit.facts.get("weights_digest", "")] for commit in commits],
        "checkpoint": commits[-1].checkpoint if commits else "",
        "facts": dict(facts or {}),
    }
    text = json.dumps({"body": body, "digest": _signature(body)}, indent=1, sort_keys=True)
    target = Path(path)
    temporary = target.with_name(f".tmp-{target.name}")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(target)
    return body


def _canary(trainer: np.ndarray | None, engine: np.ndarray | None, mode: str) -> dict[str, Any]:
    if trainer is None or engine is None:
        return {}
    difference = float(np.abs(trainer.astype(np.float64) - engine).max())
    digests = {"trainer": array_digest(trainer), "engine": array_digest(engine)}
    if mode == "exact" and digests["trainer"] != digests["engine"]:
        raise NumericsError(f"certificate refused: canary log-probabilities of trainer and engine differ by up to {difference:g} nats")
    return {"tokens": len(trainer), **digests, "logprob_diff_max_nats": difference}


def verify_certificate(path: str | Path, run_dir: str | Path) -> dict[str, Any]:
    """Check a certificate against a run directory and return its body.

    Raises:
        CheckpointError: The file or the run's state is missing or damaged.
        NumericsError: Signature, tensor, chain or statistics differ; names the first.
    """
    from strop.store import Store

    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        body, signature = record["body"], record["digest"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"certificate {path} can't be read: {error}") from None
    if _signature(body) != signature:
        raise NumericsError(f"certificate {path}: digest {_signature(body)}, signed with {signature}: the file was changed")
    store = Store(run_dir, read_only=True)
    try:
        _check_against(body, store)
    finally:
        store.close()
    return body


def _check_against(body: Mapping[str, Any], store: Store) -> None:
    commits = store.commits(phase=body["phase"])
    chain = [[commit.step, commit.facts.get("weights_digest", "")] for commit in commits]
    if chain != body["chain"]:
        pairs = enumerate(zip(chain, body["chain"], strict=False))
        wrong = next((index for index, (actual, certified) in pairs if actual != certified), min(len(chain), len(body["chain"])))
        raise NumericsError(f"certificate: the chain of weight digests differs from the run's at commit {wrong}")
    state, _ = store.load_state(body["checkpoint"])
    actual = tensor_digests(state)
    for name in sorted(set(actual) | set(body["tensors"])):
        if actual.get(name) != body["tensors"].get(name):
            raise NumericsError(f"certificate: {name} has the digest {actual.get(name)}, certified {body['tensors'].get(name)}")
    statistics = exactness(store.metrics(phase=body["phase"]))
    if statistics != body["exactness"]:
        wrong_keys = sorted(key for key in statistics if statistics[key] != body["exactness"].get(key))
        raise NumericsError(f"certificate: statistics differ from the metrics of the run: {', '.join(wrong_keys)}")
    if body["engine"]["sent"] != body["engine"]["loaded"]:
        raise NumericsError("certificate: sent and loaded weights differ")


def _signature(body: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(body, sort_keys=True, separators=(",", ":")).encode(), digest_size=32).hexdigest()
