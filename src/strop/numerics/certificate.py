"""The certificate of a run: what its weights are, that the engine had the same, and that rollout and trainer agreed at every step.

A JSON file signed by its own digest. A third party checks it with ``verify_certificate``: signature, every tensor of the state on disk,
the chain of weight digests, the statistics of every step against the metrics file, and the certificates of earlier epochs, each of which
is named by its successor. It fails closed: whatever can't be checked is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.core.errors import CheckpointError, NumericsError
from strop.numerics.canary import Canary, CanaryLimits, compare_canaries
from strop.numerics.manifest import merkle_root, signature, tensor_digests, vote

if TYPE_CHECKING:
    from strop.store import Store

NAME = "certificate.json"
FOLDER = "certificates"
FORMAT = 2

__all__ = ["FOLDER", "NAME", "EngineCheck", "Evidence", "exactness", "issue_certificate", "tensor_digests", "verify_certificate"]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCheck:
    """One engine against the trainer.

    Attributes:
        name: For messages.
        sent: ``weights_digest`` of the trainer's weights of that version.
        loaded: ``weights_digest`` of what the engine read at its last swap; never of what is sent for the certificate's sake.
        canary: What the engine computes with them, as it stands.
    """

    name: str = "engine"
    sent: str
    loaded: str
    canary: Canary | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What a certificate rests on.

    Attributes:
        state: ``Trainer.state()``: every parameter, buffer, master weight, moment and generator state of this rank.
        cursor: Where the data stands: seed, step, counts of episodes. JSON values.
        engines: Every engine that generates.
        canary: The trainer's.
        limits: How far canaries of trainer and engine may lie apart; by default not at all in exact mode.
        replicas: ``tensor_digests`` of every rank's state, by rank; empty for a single rank.
        fingerprint: Equivalence class, as ``{"digest": ..., "facts": ...}``.
    """

    state: Mapping[str, Any]
    cursor: Mapping[str, Any] = field(default_factory=dict)
    engines: Sequence[EngineCheck] = ()
    canary: Canary | None = None
    limits: CanaryLimits | None = None
    replicas: Sequence[Mapping[str, str]] = ()
    fingerprint: Mapping[str, Any] = field(default_factory=dict)


def issue_certificate(
    path: str | Path, store: Store, evidence: Evidence, *, mode: str = "exact", facts: Mapping[str, Any] | None = None, phase: str = "rl"
) -> dict[str, Any]:
    """Write the certificate of a phase up to its last commit.

    Args:
        path: The file.
        store: The run's store; its last commit of ``phase`` must hold ``evidence.state``.
        evidence: What to certify.
        mode: ``numerics.mode`` of the run.
        facts: Revision, versions and machine (``RunDir.facts``).
        phase: Phase of the commits.

    Returns:
        The body.

    Raises:
        NumericsError: Ranks differ, an engine's weights or canary differ from the trainer's, or an exact run was not exact. Names which.
            No file is written.
    """
    digests = tensor_digests(evidence.state)
    replicas = list(evidence.replicas) or [digests]
    ballot = vote(replicas)
    if not ballot.is_equal:
        raise NumericsError(f"certificate refused: {ballot.text()}", ids={"ranks": ",".join(map(str, ballot.odd))})
    statistics = exactness(store.metrics(phase=phase))
    if mode == "exact" and statistics["is_exact"] != 1.0:
        raise NumericsError(f"certificate refused: an exact run had a largest difference of {statistics['logprob_diff_max_nats']:g} nats")
    commits = store.commits(phase=phase)
    target = Path(path)
    body: dict[str, Any] = {
        "format": FORMAT,
        "phase": phase,
        "mode": mode,
        "tensors": digests,
        "ranks": {str(rank): merkle_root(manifest) for rank, manifest in enumerate(replicas)},
        "cursor": dict(evidence.cursor),
        "engines": {engine.name: {"sent": engine.sent, "loaded": engine.loaded} for engine in evidence.engines},
        "canary": _canaries(evidence, mode),
        "fingerprint": dict(evidence.fingerprint),
        "exactness": statistics,
        "chain": [[commit.step, commit.facts.get("weights_digest", "")] for commit in commits],
        "checkpoint": commits[-1].checkpoint if commits else "",
        "previous": _last_signature(target, commits[-1].step if commits else -1),
        "facts": dict(facts or {}),
    }
    text = json.dumps({"body": body, "digest": signature(body)}, indent=1, sort_keys=True)
    target.parent.mkdir(exist_ok=True)
    temporary = target.with_name(f".tmp-{target.name}")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(target)
    return body


def _canaries(evidence: Evidence, mode: str) -> dict[str, Any]:
    """Check every engine and return what the file says about canaries."""
    trainer = evidence.canary
    limits = evidence.limits or CanaryLimits()
    found: dict[str, Any] = {}
    for engine in evidence.engines:
        if engine.sent != engine.loaded:
            raise NumericsError(
                f"certificate refused: weights sent have the digest {engine.sent}, {engine.name} has {engine.loaded}: stale or misexported"
            )
        if engine.canary is None or trainer is None:
            continue
        difference = compare_canaries(trainer, engine.canary)
        breach = "" if mode == "off" or (mode == "tolerant" and evidence.limits is None) else limits.breach(difference)
        if breach:
            raise NumericsError(f"certificate refused: {engine.name} against trainer, same weights: {breach}")
        found[engine.name] = {
            "digests": engine.canary.digests(),
            "logprob_diff_max_nats": difference.logprob_max_nats,
            "routes_frac": difference.routes_frac,
        }
    if trainer is None:
        return {}
    sketches = [] if trainer.sketches is None else [[float(value).hex() for value in row] for row in trainer.sketches]
    return {
        "tokens": len(trainer.logprobs),
        "digests": trainer.digests(),
        "logprobs": [float(value).hex() for value in trainer.logprobs],
        "sketches": sketches,
        "engines": found,
        "logprob_diff_max_nats": max((entry["logprob_diff_max_nats"] for entry in found.values()), default=0.0),
    }


def _history(folder: Path) -> list[tuple[int, Path, dict[str, Any]]]:
    """Every certificate of the epochs in a folder as ``(step, file, record)``, in order."""
    records = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        record = _read(path)
        records.append((record["body"]["chain"][-1][0] if record["body"]["chain"] else -1, path, record))
    return sorted(records, key=lambda entry: entry[0])


def _last_signature(target: Path, step: int) -> str:
    """Signature of the certificate before ``step``, ``""`` if it is the first."""
    folder = target.parent if target.parent.name == FOLDER else target.parent / FOLDER
    return next((record["digest"] for before, _, record in reversed(_history(folder)) if before < step), "")


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        body, signed = record["body"], record["digest"]
        chain = body["chain"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"certificate {path} can't be read: {error}") from None
    if signature(body) != signed:
        raise NumericsError(f"certificate {path}: digest {signature(body)}, signed with {signed}: the file was changed")
    if body.get("format") != FORMAT or not isinstance(chain, list):
        raise CheckpointError(
            f"certificate {path} has format {body.get('format')!r}, expected {FORMAT}: written by another version of strop"
        )
    return record


def verify_certificate(path: str | Path, run_dir: str | Path) -> dict[str, Any]:
    """Check a certificate, and those of the epochs before it, against a run directory and return its body.

    Raises:
        CheckpointError: The file or the run's state is missing or damaged.
        NumericsError: Signature, tensor, chain, statistics or an earlier certificate differ; names the first.
    """
    from strop.store import Store

    body = _read(Path(path))["body"]
    is_epoch = Path(path).parent.name == FOLDER  # then the run went on, and its chain and metrics are longer
    store = Store(run_dir, read_only=True)
    try:
        _check_history(Path(run_dir), body, store)
        _check_against(body, store, is_epoch)
    finally:
        store.close()
    return body


def _check_history(run_dir: Path, body: Mapping[str, Any], store: Store) -> None:
    """Walk back from ``body`` over its predecessors; each must be there, unchanged, and a beginning of the run's own chain."""
    known = {record["digest"]: (path, record["body"]) for _, path, record in _history(run_dir / FOLDER)}
    chain = _chain(store, body["phase"])
    wanted = body["previous"]
    while wanted:
        if wanted not in known:
            raise NumericsError(f"certificate: the certificate {wanted} that came before it is not in {run_dir / FOLDER}")
        path, earlier = known.pop(wanted)
        if earlier["chain"] != chain[: len(earlier["chain"])]:
            raise NumericsError(f"certificate {path}: its chain of weight digests is not the beginning of the run's")
        wanted = earlier["previous"]


def _chain(store: Store, phase: str) -> list[list[Any]]:
    return [[commit.step, commit.facts.get("weights_digest", "")] for commit in store.commits(phase=phase)]


def _check_against(body: Mapping[str, Any], store: Store, is_epoch: bool) -> None:
    chain = _chain(store, body["phase"])
    metrics = store.metrics(phase=body["phase"])
    if is_epoch:
        chain = chain[: len(body["chain"])]
        metrics = [record for record in metrics if record["step"] <= body["chain"][-1][0]]
    if chain != body["chain"]:
        pairs = enumerate(zip(chain, body["chain"], strict=False))
        wrong = next((index for index, (actual, certified) in pairs if actual != certified), min(len(chain), len(body["chain"])))
        raise NumericsError(f"certificate: the chain of weight digests differs from the run's at commit {wrong}")
    state, _ = store.load_state(body["checkpoint"])
    actual = tensor_digests(state)
    for name in sorted(set(actual) | set(body["tensors"])):
        if actual.get(name) != body["tensors"].get(name):
            raise NumericsError(f"certificate: {name} has the digest {actual.get(name)}, certified {body['tensors'].get(name)}")
    if set(body["ranks"].values()) != {merkle_root(actual)}:
        raise NumericsError(f"certificate: ranks {sorted(body['ranks'])} have not all the root {merkle_root(actual)} of the state")
    statistics = exactness(metrics)
    if statistics != body["exactness"]:
        wrong_keys = sorted(key for key in statistics if statistics[key] != body["exactness"].get(key))
        raise NumericsError(f"certificate: statistics differ from the metrics of the run: {', '.join(wrong_keys)}")
    for name, engine in body["engines"].items():
        if engine["sent"] != engine["loaded"]:
            raise NumericsError(f"certificate: weights sent to {name} and weights that it loaded differ")
