"""``strop numerics certify | localise | calibrate | price`` over a run directory: loads what a run committed and looks at it afresh."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strop.cli.models import find_model, is_run, model_dir
from strop.core.errors import CheckpointError, NumericsError
from strop.model.checkpoint import load_checkpoint
from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder
from strop.model.training import TrainModel
from strop.numerics.calibrate import Floors, calibrate_decoder, calibrate_exact, pack_streams
from strop.numerics.canary import CanaryLimits, canary_streams, compare_canaries, sketch, sketch_distance, trainer_view
from strop.numerics.certificate import FOLDER, NAME, verify_certificate
from strop.numerics.digest import weights_digest
from strop.numerics.fingerprint import Fingerprint
from strop.numerics.localise import Finding, diagnose, load_trace, record, save_trace
from strop.numerics.price import Price, fresh_decoder, price_list
from strop.runtime.build import device, make_engine
from strop.runtime.certify import FLOORS, certify_state, read_floors, recorded_canary, run_fingerprint
from strop.store import RunDir
from strop.store.files import write_atomic

RANKS = "ranks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """The last commit of RL, loaded.

    Attributes:
        decoder: Sizes.
        state: ``Trainer.state()`` as committed.
        model: The trained model.
        threads: CPU threads.
        step: The step.
    """

    decoder: DecoderConfig
    state: Mapping[str, Any]
    model: TrainModel
    threads: int
    step: int


def load_committed(run: RunDir) -> Committed:
    """Load the last commit of RL.

    Raises:
        CheckpointError: The run has none, or its files are damaged.
    """
    commit = run.store.last_step("rl")
    if commit is None:
        raise CheckpointError(f"{run.path} has no committed step of RL yet; stage done: {run.store.stage() or 'none'}")
    state, _ = run.store.load_state(commit.checkpoint)
    decoder, _ = load_checkpoint(model_dir(run.config.model.base))
    config = run.config
    threads = config.model.threads or len(os.sched_getaffinity(0))
    mode = "exact" if config.numerics.mode == "exact" else "tolerant"
    model = TrainModel(decoder, state["weights"], mode=mode, threads=threads, device=device(config))
    return Committed(decoder=decoder, state=state, model=model, threads=threads, step=commit.step)


# ---------------------------------------------------------------------------------------------------- certify


def certify_run(run: RunDir) -> list[str]:
    """Compute everything that a certificate rests on again, here and now; hold it against the run's certificate or write one.

    Returns:
        What was found, a line each.

    Raises:
        CheckpointError: No committed step, or damaged files.
        NumericsError: Something differs; names the first.
    """
    committed = load_committed(run)
    file = run.path / NAME
    lines = []
    if file.is_file():
        body = verify_certificate(file, run.path)
        lines.append(f"{NAME}: verified, {len(body['tensors'])} tensors, {len(body['chain'])} weight digests")
        lines.append(_compare_with(body, run, committed))
    target = f"{FOLDER}/rl-{committed.step:05d}.json"
    if not file.is_file() and not (run.path / target).is_file():
        asyncio.run(_issue(run, committed, target))
        lines.append(f"{target}: written")
    elif not file.is_file():
        body = verify_certificate(run.path / target, run.path)
        lines.append(f"{target}: verified, {len(body['tensors'])} tensors")
        lines.append(_compare_with(body, run, committed))
    return lines


async def _issue(run: RunDir, committed: Committed, target: str) -> None:
    engine = make_engine(run.config, committed.decoder, committed.model.weights(), threads=committed.threads)
    try:
        weights = committed.model.weights()
        await engine.swap(weights, committed.step + 1)
        await certify_state(run, committed.state, committed.model, engine, target, threads=committed.threads)
    finally:
        await engine.close()


def _compare_with(body: dict[str, Any], run: RunDir, committed: Committed) -> str:
    """Compute the canary here and hold it against the recorded one: equal bits inside the class, calibrated limits across."""
    recorded = recorded_canary(body)
    difference = compare_canaries(recorded, trainer_view(committed.model, canary_streams(committed.decoder.vocab_size)))
    here, there = run_fingerprint(run.config, committed.threads), Fingerprint.of(body["fingerprint"]["facts"])
    if here.digest == there.digest:
        breach = CanaryLimits().breach(difference)
        if breach:
            raise NumericsError(f"same equivalence class, but {breach}")
        return f"canary: {body['canary']['tokens']} log-probabilities and every layer's sketch have the recorded bits"
    floors = read_floors(run.path)
    limits = CanaryLimits.from_floors(floors["engine"]) if floors else CanaryLimits(logprob_max_nats=run.config.numerics.max_abs_diff)
    breach = limits.breach(difference)
    if breach:
        raise NumericsError(f"another equivalence class ({'; '.join(here.differences(there))}), and {breach}")
    kind = "calibrated" if floors else "uncalibrated"
    return (
        f"canary: another equivalence class ({'; '.join(here.differences(there))}), so compared with tolerance: largest difference "
        f"{difference.logprob_max_nats:g} nats, {kind} limit {limits.logprob_max_nats:g}"
    )


# ---------------------------------------------------------------------------------------------------- localise


def dump_rank(run_dir: Path, rank: int, decoder: Decoder, streams: Sequence[np.ndarray]) -> Path:
    """Write what a suspect rank computes on canaries, and its weights: the material of ``localise_run``. Returns the trace's path."""
    from safetensors.torch import save_file

    path = run_dir / RANKS / f"rank-{rank}.npz"
    packed = pack_streams(streams)
    save_trace(path, record(decoder, packed), packed)
    names = {name: value.detach().cpu().contiguous() for name, value in decoder.named_parameters()}
    save_file(names, str(path.with_suffix(".safetensors")))
    return path


def localise_run(run: RunDir, rank: int) -> list[str]:
    """Name the first layer and operation in which a rank went wrong.

    A rank that left a trace (``dump_rank``) is taken from there. Otherwise this process computes the canaries with the run's own kernels
    and holds each layer's router logits against the torch decoder.

    Raises:
        CheckpointError: No committed step, no trace of that rank, or damaged files.
    """
    committed = load_committed(run)
    trusted = fresh_decoder(committed.decoder, committed.model.weights())
    path = run.path / RANKS / f"rank-{rank}.npz"
    if path.is_file():
        return [f"rank {rank}: {_diagnose_dump(path, trusted, run).text()}"]
    if rank:
        known = sorted(entry.stem for entry in (run.path / RANKS).glob("*.npz"))
        raise CheckpointError(
            f"rank {rank} left no trace in {run.path / RANKS} (there: {', '.join(known) or 'none'}); this process is rank 0"
        )
    return [_compare_layers(committed, trusted)]


def _diagnose_dump(path: Path, trusted: Decoder, run: RunDir) -> Finding:
    from safetensors.torch import load_file

    trace, _ = load_trace(path)
    own = path.with_suffix(".safetensors")
    if not own.is_file():
        raise CheckpointError(f"{own} is missing: the weights of the rank that left {path.name}")
    suspect = fresh_decoder(trusted.config, load_file(str(own)))
    floors = read_floors(run.path)
    limits = {name: 10 * value for name, value in floors["operations"].items()} if floors else None
    streams = canary_streams(trusted.config.vocab_size)[: len(load_trace(path)[1].lengths)]
    return diagnose(trace, suspect, trusted, pack_streams(streams), limits)


def _compare_layers(committed: Committed, trusted: Decoder) -> str:
    """Router logits, layer by layer, of the run's own kernels against the torch decoder."""
    streams = canary_streams(committed.decoder.vocab_size)
    own = trainer_view(committed.model, streams)
    again = trainer_view(committed.model, streams)
    if not compare_canaries(own, again).is_equal:
        return "rank 0: two passes over the canaries differ: transient"
    floors = calibrate_decoder(trusted, streams, threads=(1,))
    with torch.no_grad():
        reference = trusted(pack_streams(streams))
    layers = np.stack([sketch(logits.numpy()) for logits in reference.router_logits])
    assert own.sketches is not None
    distances = sketch_distance(layers, own.sketches)
    # Kernels of another design round differently everywhere, and a layer inherits what came before: ten times the floor, as across classes.
    limits = [10 * max(value, float(np.finfo(np.float32).eps)) for value in np.maximum.accumulate(floors.layers)]
    odd = [layer for layer, (value, limit) in enumerate(zip(distances, limits, strict=True)) if not value <= limit]
    if odd:
        return f"rank 0: first odd layer {odd[0]}: router logits are off by {distances[odd[0]]:.3g}, limit {limits[odd[0]]:.3g}: persistent"
    return f"rank 0: no layer is odd; relative distance to the torch decoder at most {float(distances.max()):.3g}, two passes agree"


# ---------------------------------------------------------------------------------------------------- calibrate, price


def calibrate_run(run: RunDir) -> dict[str, Any]:
    """Measure benign floors for the run's last weights on this machine and keep them with the class's fingerprint."""
    committed = load_committed(run)
    streams = canary_streams(committed.decoder.vocab_size)
    weights = committed.model.weights()
    tolerant = calibrate_decoder(fresh_decoder(committed.decoder, weights), streams)
    engine: Floors = tolerant
    if run.config.numerics.mode == "exact":
        engine = calibrate_exact(committed.decoder, weights, streams)
    here = run_fingerprint(run.config, committed.threads)
    floors = {
        "fingerprint": {"digest": here.digest, "facts": dict(here.facts)},
        "weights_digest": weights_digest(weights),
        "engine": tolerant.as_json() | {"operations": {}},
        "own_class": engine.as_json() | {"operations": {}},
        "operations": tolerant.operations,
    }
    write_atomic(run.path / FLOORS, (json.dumps(floors, indent=1) + "\n").encode())
    return floors


def price_model(path: Path, kind: str, overrides: Sequence[str]) -> list[Price]:
    """Price the lines of the precision policy on the model of a run, or on a checkpoint."""
    directory = find_model(path)
    decoder, weights = load_checkpoint(directory)
    return price_list(decoder, weights, price_streams(path, decoder), kind, overrides)


def price_streams(path: Path, decoder: DecoderConfig) -> list[np.ndarray]:
    """Token streams of a run's own episodes (they say most), else canaries."""
    if not is_run(path):
        return canary_streams(decoder.vocab_size)
    with RunDir.open(path) as run:
        traces = (trace.token_ids for episode in run.store.episodes(phase="rl") for trace in episode.traces)
        found = [ids[:512].astype(np.int32) for _, ids in zip(range(16), traces, strict=False) if len(ids) > 1]
    return found or canary_streams(decoder.vocab_size)
