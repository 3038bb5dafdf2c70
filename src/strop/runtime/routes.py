"""``strop routes record``: the routes of a finished run on its own data, for later runs to start close to."""

from __future__ import annotations

from typing import Any

import numpy as np

from strop.cli.models import find_model, model_dir, pool_dir
from strop.core.episode import EpisodeKey
from strop.core.errors import CheckpointError
from strop.core.sample import Sample
from strop.midtrain.phase import PHASE, make_documents, midtrain_tasks
from strop.midtrain.trajectories import as_sample
from strop.model.checkpoint import load_checkpoint
from strop.model.routing.families import router_spec
from strop.numerics.digest import weights_digest
from strop.rl.anchor import FOLDER, save_record
from strop.rl.route_record import record_streams
from strop.runtime.build import Parts, build_parts
from strop.store import RunDir


def record_run(run: RunDir, *, limit: int = 0) -> dict[str, Any]:
    """Record the routes of a run's best model on the run's mid-training documents and RL episodes.

    Args:
        run: A run with a published model.
        limit: Most streams of each phase; 0 takes all.

    Returns:
        What was written: streams, rows, bytes, and the folder.

    Raises:
        CheckpointError: The run has no model or no data yet.
    """
    parts = build_parts(run.config, model_dir(run.config.model.base), pool_dir(run.config.tasks.pool))
    decoder, weights = load_checkpoint(find_model(run.path))
    model = parts.train_model(weights)
    documents, episodes = _documents(run, parts, limit), _episodes(run, limit)
    if not documents and not episodes:
        raise CheckpointError(f"{run.path} has neither mid-training documents nor RL episodes to record routes on")
    digest = weights_digest(model.weights())
    facts = {"run": str(run.path), "weights_digest": digest, "midtrain_streams": len(documents), "rl_streams": len(episodes)}
    spec = router_spec(decoder)
    last = run.store.last_step()
    version = last.step + 1 if last is not None else 0
    record = record_streams(model, [*documents, *episodes], spec=spec, vocab=decoder.vocab_size, version=version, facts=facts)
    folder = run.path / FOLDER
    save_record(folder, record)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {"folder": str(folder), "streams": len(record.packs), "rows": record.facts["rows"], "bytes": size}


def _documents(run: RunDir, parts: Parts, limit: int) -> list[Sample]:
    """Mid-training's documents, made again from the stored expert episodes: a function of the seed."""
    pool = parts.tasks.repairs
    if not run.config.midtrain.enabled or pool is None:
        return []
    tasks = midtrain_tasks(pool, run.config.midtrain.episodes, run.config.seed)
    stored = {row.key for row in run.store.rows(phase=PHASE)}
    keys = [EpisodeKey(phase=PHASE, step=0, task_id=task.task_id, sample=0) for task in tasks]
    if not all(key in stored for key in keys):
        return []
    played = [(task, run.store.get(key)) for task, key in zip(tasks, keys, strict=True)]
    made = make_documents(run.config, played, pool=pool, tokenizer=parts.tokenizer)
    return [as_sample(document, keys[0]) for document in made[: limit or None]]


def _episodes(run: RunDir, limit: int) -> list[Sample]:
    samples: list[Sample] = []
    for row in run.store.rows(phase="rl"):
        if limit and len(samples) >= limit:
            break
        episode = run.store.get(row.key)
        for trace in episode.traces:
            samples.append(Sample(key=episode.key, trace=trace, advantage=trace.loss_mask.astype(np.float32)))
    return samples
