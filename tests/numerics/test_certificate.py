"""The certificate: issued for a clean run, refused or found out for every planted fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strop.core.config import RunConfig
from strop.core.errors import NumericsError
from strop.numerics.certificate import issue_certificate, tensor_digests, verify_certificate
from strop.store import RunDir


def state() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    weights = {"a": torch.randn(3, 4, generator=draw), "b": torch.randn(5, generator=draw)}
    moments = {"first": {n: t * 0.1 for n, t in weights.items()}, "second": {n: t * t for n, t in weights.items()}, "steps": 2}
    return {"version": 2, "weights": weights, "optimizer": moments}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    with RunDir.create(path, RunConfig()) as opened:
        for step in range(2):
            metrics = {"numerics/tokens": 50.0, "numerics/is_exact": 1.0, "numerics/logprob_diff_max_nats": 0.0}
            opened.store.log(step, metrics)
            opened.store.save_state(f"rl-{step}", state(), {}, rolling=True)
            opened.store.commit_step(step, checkpoint=f"rl-{step}", weights_digest=f"d{step}")
        issue(opened, path)
    return path


def issue(opened: RunDir, path: Path, **changes: Any) -> dict[str, Any]:
    canary = np.linspace(-3, -1, 20, dtype=np.float32)
    arguments = {"state": state(), "sent_digest": "x", "loaded_digest": "x", "trainer_logprobs": canary, "engine_logprobs": canary}
    return issue_certificate(path / "certificate.json", opened.store, **(arguments | changes))


def test_clean_run_verifies(run: Path) -> None:
    body = verify_certificate(run / "certificate.json", run)
    assert body["exactness"]["tokens"] == 100
    assert body["exactness"]["logprob_diff_max_nats"] == 0
    assert set(body["tensors"]) >= {"weights/a", "optimizer/first/b", "optimizer/steps", "version"}


@pytest.mark.parametrize("name", ["weights/a", "weights/b", "optimizer/first/a", "optimizer/second/b"])
@pytest.mark.parametrize("bit", [0, 12, 22, 31])
def test_any_flipped_bit_is_found_by_name(run: Path, name: str, bit: int) -> None:
    flipped = state()
    *path, leaf = name.split("/")
    node = flipped
    for part in path:
        node = node[part]
    array = node[leaf].numpy().copy()
    array.view(np.uint32).reshape(-1)[2] ^= np.uint32(1 << bit)
    node[leaf] = torch.from_numpy(array)
    good, bad = tensor_digests(state()), tensor_digests(flipped)
    assert [key for key in good if good[key] != bad[key]] == [name]


def test_state_on_disk_that_differs_is_found(run: Path) -> None:
    other = state()
    other["optimizer"]["second"]["b"][1] += 1e-6
    with RunDir.create(run, RunConfig(), resume=True) as opened:
        opened.store.save_state("rl-1", other, {}, rolling=True)
    with pytest.raises(NumericsError, match="optimizer/second/b has the digest"):
        verify_certificate(run / "certificate.json", run)


@pytest.mark.parametrize("key", ["chain", "exactness", "tensors"])
def test_edited_certificate_is_found(run: Path, key: str) -> None:
    path = run / "certificate.json"
    record = json.loads(path.read_text())
    record["body"][key] = type(record["body"][key])()
    path.write_text(json.dumps(record))
    with pytest.raises(NumericsError, match="the file was changed"):
        verify_certificate(path, run)


def test_run_that_went_on_is_found(run: Path) -> None:
    with RunDir.create(run, RunConfig(), resume=True) as opened:
        opened.store.save_state("rl-2", state(), {}, rolling=True)
        opened.store.commit_step(2, checkpoint="rl-2", weights_digest="d2")
    with pytest.raises(NumericsError, match="chain of weight digests differs from the run's at commit 2"):
        verify_certificate(run / "certificate.json", run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loaded_digest": "y"}, "weights sent have the digest x, the engine holds y"),
        ({"engine_logprobs": np.linspace(-3, -0.999999, 20, dtype=np.float32)}, "canary log-probabilities"),
    ],
)
def test_refused(run: Path, changes: dict[str, Any], message: str) -> None:
    (run / "certificate.json").unlink()
    with RunDir.create(run, RunConfig(), resume=True) as opened, pytest.raises(NumericsError, match=message):
        issue(opened, run, **changes)
    assert not (run / "certificate.json").exists()


def test_exact_run_that_was_not_exact_is_refused(run: Path) -> None:
    with RunDir.create(run, RunConfig(), resume=True) as opened:
        opened.store.log(2, {"numerics/tokens": 9.0, "numerics/is_exact": 0.0, "numerics/logprob_diff_max_nats": 1e-7})
        with pytest.raises(NumericsError, match="largest difference of 1e-07"):
            issue(opened, run)
        issue(opened, run, mode="tolerant")
