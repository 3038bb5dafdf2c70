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
from strop.numerics.canary import Canary, CanaryLimits
from strop.numerics.certificate import EngineCheck, Evidence, issue_certificate, tensor_digests, verify_certificate
from strop.numerics.manifest import signature
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
    file, mode = path / changes.pop("file", "certificate.json"), changes.pop("mode", "exact")
    loaded, heard = changes.pop("loaded", "x"), changes.pop("heard", canary())
    engines = (EngineCheck(name="engine", sent="x", loaded=loaded, canary=heard),)
    evidence = Evidence(**({"state": state(), "engines": engines, "canary": canary(), "cursor": {"seed": 1}} | changes))
    return issue_certificate(file, opened.store, evidence, mode=mode)


def canary(**changes: np.ndarray) -> Canary:
    routes = np.arange(40, dtype=np.uint16).reshape(5, 4, 2)
    parts = {"logprobs": np.linspace(-3, -1, 20, dtype=np.float32), "routes": routes, "sketches": np.ones((4, 8))}
    return Canary(**(parts | changes))


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


def nudged_routes() -> np.ndarray:
    routes = np.array(canary().routes)
    routes[3, 2, 1] += 1
    return routes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loaded": "y"}, "weights sent have the digest x, engine has y"),
        ({"heard": canary(logprobs=np.linspace(-3, -0.999999, 20, dtype=np.float32))}, "equal bits are due, after the last router"),
        ({"heard": canary(routes=nudged_routes())}, "equal bits are due, first in layer 2"),
        ({"heard": canary(logprobs=np.zeros(7, np.float32))}, "canaries of 20 and 7 tokens"),
        ({"replicas": [tensor_digests(state())] * 2 + [tensor_digests(state() | {"version": 3})]}, "rank 2 differs from the majority of 3"),
        ({"replicas": [tensor_digests(state()), {}]}, "no majority says who is right"),
        ({"state": state() | {"what": object()}}, "what is a object, which can't be hashed"),
    ],
)
def test_refused(run: Path, changes: dict[str, Any], message: str) -> None:
    (run / "certificate.json").unlink()
    with RunDir.create(run, RunConfig(), resume=True) as opened, pytest.raises(NumericsError, match=message):
        issue(opened, run, **changes)
    assert not (run / "certificate.json").exists()


def test_calibrated_limits_name_the_layer(run: Path) -> None:
    limits = CanaryLimits.from_floors({"logprob_max_nats": 1e-6, "layers": [1e-7] * 4})
    near, far = np.ones((4, 8)), np.ones((4, 8))
    near[2] += 5e-7
    far[2] += 5e-6
    with RunDir.create(run, RunConfig(), resume=True) as opened:
        issue(opened, run, mode="tolerant", limits=limits, heard=canary(sketches=near))
        with pytest.raises(NumericsError, match="layer 2 is off by 5e-06"):
            issue(opened, run, mode="tolerant", limits=limits, heard=canary(sketches=far))
        with pytest.raises(NumericsError, match="differ by up to inf"):
            issue(opened, run, mode="tolerant", limits=limits, heard=canary(logprobs=np.full(20, np.nan, np.float32)))


def run_on(run: Path, step: int) -> None:
    """One more step and its certificate."""
    with RunDir.create(run, RunConfig(), resume=True) as opened:
        opened.store.save_state(f"rl-{step}", state(), {}, rolling=True)
        opened.store.commit_step(step, checkpoint=f"rl-{step}", weights_digest=f"d{step}")
        issue(opened, run, file=f"certificates/rl-{step:05d}.json")


def test_certificates_of_epochs_form_a_chain(run: Path) -> None:
    run_on(run, 2)
    run_on(run, 3)
    with RunDir.create(run, RunConfig(), resume=True) as opened:
        opened.store.save_state("rl-4", state(), {}, rolling=True)
        opened.store.commit_step(4, checkpoint="rl-4", weights_digest="d4")
        body = issue(opened, run)
    second = json.loads((run / "certificates/rl-00003.json").read_text())
    assert body["previous"] == second["digest"]
    assert second["body"]["previous"] == json.loads((run / "certificates/rl-00002.json").read_text())["digest"]
    verify_certificate(run / "certificate.json", run)


@pytest.mark.parametrize("fault", ["removed", "edited", "of another run"])
def test_a_fault_in_an_earlier_certificate_is_found(run: Path, fault: str) -> None:
    run_on(run, 2)
    earlier = run / "certificates/rl-00002.json"
    record = json.loads(earlier.read_text())
    if fault == "of another run":  # signed properly, but with another chain; the next certificate then names it
        record["body"]["chain"][0][1] = "d9"
        record["digest"] = signature(record["body"])
        earlier.write_text(json.dumps(record))
    with RunDir.create(run, RunConfig(), resume=True) as opened:
        opened.store.save_state("rl-3", state(), {}, rolling=True)
        opened.store.commit_step(3, checkpoint="rl-3", weights_digest="d3")
        issue(opened, run)
    if fault == "removed":
        earlier.unlink()
    elif fault == "edited":
        record["body"]["cursor"] = {"seed": 2}
        earlier.write_text(json.dumps(record))
    messages = {"removed": "is not in", "edited": "the file was changed", "of another run": "not the beginning of the run's"}
    with pytest.raises(NumericsError, match=messages[fault]):
        verify_certificate(run / "certificate.json", run)


def test_exact_run_that_was_not_exact_is_refused(run: Path) -> None:
    with RunDir.create(run, RunConfig(), resume=True) as opened:
        opened.store.log(2, {"numerics/tokens": 9.0, "numerics/is_exact": 0.0, "numerics/logprob_diff_max_nats": 1e-7})
        with pytest.raises(NumericsError, match="largest difference of 1e-07"):
            issue(opened, run)
        issue(opened, run, mode="tolerant")
