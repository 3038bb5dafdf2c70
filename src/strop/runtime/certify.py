"""Certificates of a running policy: gathers the evidence from trainer and engine as they stand, and writes the file."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from strop.core.config import RunConfig
from strop.core.errors import CheckpointError, EngineError, NumericsError
from strop.engine.embedded import EmbeddedEngine
from strop.numerics.canary import Canary, CanaryLimits, canary_streams, compare_canaries, engine_view, trainer_view
from strop.numerics.certificate import FOLDER, EngineCheck, Evidence, issue_certificate
from strop.numerics.digest import weights_digest
from strop.numerics.fingerprint import Fingerprint, fingerprint
from strop.numerics.precision import Precision
from strop.rl.scoring import ScoringModel
from strop.rl.trainer import PolicyTrainer
from strop.store import RunDir

FLOORS = "numerics-floors.json"


async def certify_policy(run: RunDir, trainer: PolicyTrainer, engine: EmbeddedEngine, file: str, *, threads: int) -> dict[str, Any]:
    """Certify the last commit of the RL phase of a running trainer; see ``certify_state``."""
    return await certify_state(run, trainer.state(), trainer.model, engine, file, threads=threads)


async def certify_state(
    run: RunDir, state: Mapping[str, Any], model: ScoringModel, engine: EmbeddedEngine, file: str, *, threads: int
) -> dict[str, Any]:
    """Write a certificate and return a summary for the report.

    The engine is taken as it stands: nothing is sent to it first, or a stale engine would be repaired before anybody looked.

    Args:
        run: The run; its last commit of RL must hold ``state``.
        state: ``Trainer.state()``.
        model: The trained model with those weights.
        engine: What generates.
        file: Where in the run directory.
        threads: CPU threads of the model.

    Raises:
        NumericsError: See ``issue_certificate``.
    """
    began = time.perf_counter()
    config, store = run.config, run.store
    weights = model.weights()
    streams = canary_streams(weights["model.embed_tokens.weight"].shape[0])
    sent = weights_digest(weights)
    mine = await asyncio.to_thread(trainer_view, model, streams)
    check = EngineCheck(name="engine", sent=sent, loaded=engine.loaded_digest, canary=await engine_view(engine, streams))
    here = run_fingerprint(config, threads)
    evidence = Evidence(
        state=state,
        cursor=_cursor(config, store),
        engines=(check,),
        canary=mine,
        limits=canary_limits(run.path, here, config),
        fingerprint={"digest": here.digest, "facts": dict(here.facts)},
    )
    body = issue_certificate(run.path / file, store, evidence, mode=config.numerics.mode, facts=run.facts)
    return {
        "file": file,
        "weights_digest": sent,
        "tensors certified": len(body["tensors"]),
        "canary tokens": body["canary"]["tokens"],
        "canary largest difference": body["canary"]["logprob_diff_max_nats"],
        "epochs certified": _epochs(run.path),
        "seconds": round(time.perf_counter() - began, 3),
        **{key.replace("_", " "): value for key, value in body["exactness"].items()},
    }


async def explain(error: NumericsError, trainer: PolicyTrainer, engine: EmbeddedEngine) -> NumericsError:
    """Add to a stopped step what a look at both sides tells: other weights, or the same weights computed in another way, and from where on.

    Returns:
        An error with the culprit in its message; ``error`` itself where that names it already.
    """
    if {"state", "ranks"} & set(error.ids):  # its culprit is named already
        return error
    weights = trainer.model.weights()
    sent, loaded = weights_digest(weights), engine.loaded_digest
    if loaded != sent:
        found = f"the engine holds other weights (digest {loaded[:12]}) than the trainer ({sent[:12]}): stale or misexported"
        return NumericsError(f"{error}. Culprit: {found}", ids=error.ids)
    streams = canary_streams(weights["model.embed_tokens.weight"].shape[0])
    mine = await asyncio.to_thread(trainer_view, trainer.model, streams)
    try:
        theirs = await engine_view(engine, streams)
    except EngineError as broken:
        return NumericsError(f"{error}. The engine can't say more: {broken}", ids=error.ids)
    difference = compare_canaries(mine, theirs)
    if difference.is_equal:
        found = "engine and trainer hold equal weights and agree on the canaries now: transient, or in the record of the episodes"
    else:
        place = f"first in the routes of layer {difference.first_layer}" if difference.first_layer >= 0 else "no route differs"
        found = f"equal weights, but engine and trainer compute canaries up to {difference.logprob_max_nats:g} nats apart, {place}"
    return NumericsError(f"{error}. Culprit: {found}", ids=error.ids)


def run_fingerprint(config: RunConfig, threads: int) -> Fingerprint:
    """Return the equivalence class of a run in this process."""
    precision = Precision.of_config(config.numerics)
    text = "fp32" if precision.is_plain else f"{precision.scale}: {', '.join(f'{op}={kind}' for op, kind in precision.dtypes.items())}"
    return fingerprint(config.numerics.mode, threads=threads, precision=text)


def canary_limits(run_dir: Path, here: Fingerprint, config: RunConfig) -> CanaryLimits | None:
    """What trainer and engine may differ by: nothing in exact mode, ten times the calibrated floors of this class otherwise.

    Without a calibration for this class, and for a rollout in low precision, ``numerics.max_abs_diff`` is all there is.

    Raises:
        CheckpointError: The floors' file is damaged.
    """
    if config.numerics.mode == "exact":
        return CanaryLimits()
    floors = read_floors(run_dir) if Precision.of_config(config.numerics).is_plain else None
    if floors is not None and floors["fingerprint"]["digest"] == here.digest:
        return CanaryLimits.from_floors(floors["engine"])
    return CanaryLimits(logprob_max_nats=config.numerics.max_abs_diff)


def read_floors(run_dir: Path) -> dict[str, Any] | None:
    """Return what ``strop numerics calibrate`` measured, ``None`` if it has not run.

    Raises:
        CheckpointError: The file is damaged.
    """
    path = run_dir / FLOORS
    try:
        floors = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(floors["fingerprint"]["digest"], str):
            raise TypeError("no fingerprint")
        return floors
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; run strop numerics calibrate again") from None


def recorded_canary(body: dict[str, Any]) -> Canary:
    """Return the trainer's canary as a certificate holds it (log-probabilities and sketches)."""
    canary = body["canary"]
    sketches = np.array([[float.fromhex(value) for value in row] for row in canary["sketches"]])
    logprobs = np.array([float.fromhex(value) for value in canary["logprobs"]], np.float32)
    return Canary(logprobs=logprobs, sketches=sketches if len(sketches) else None)


def _cursor(config: RunConfig, store: Any) -> dict[str, Any]:
    """Where generators and data stand. All randomness is keyed by the seed and the step, so these are the generators' states."""
    commit = store.last_step("rl")
    facts = commit.facts if commit is not None else {}
    return {
        "seed": config.seed,
        "step": commit.step if commit is not None else -1,
        "policy_version": facts.get("policy_version", 0),
        "conservation": facts.get("conservation", {}),
    }


def _epochs(run_dir: Path) -> int:
    folder = run_dir / FOLDER
    return len(list(folder.glob("*.json"))) if folder.is_dir() else 0
