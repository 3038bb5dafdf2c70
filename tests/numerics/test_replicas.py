"""Replicas in real processes: any flipped bit of any tensor names its rank, neighbours name a wrong gradient, sums have one set of bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gloo_ranks
import pytest
import torch

WORLD = 3
DEADLINE_S = 110


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("gloo")
    command = [sys.executable, gloo_ranks.__file__]
    ranks = [subprocess.Popen([*command, str(rank), str(WORLD), str(directory)]) for rank in range(WORLD)]
    try:
        assert [process.wait(DEADLINE_S) for process in ranks] == [0] * WORLD
    finally:
        for process in ranks:
            process.kill()
    return [json.loads((Path(directory) / f"rank-{rank}.json").read_text()) for rank in range(WORLD)]


def test_every_rank_sees_the_same(seen: list[dict[str, Any]]) -> None:
    for key in seen[0]:
        if not key.startswith("buddies"):
            assert seen[0][key] == seen[1][key] == seen[2][key], key
    assert seen[0]["gathered"] == [{"rank": rank, "text": "ü" * rank} for rank in range(WORLD)]


def test_clean_replicas_are_silent(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["clean"] == ""


@pytest.mark.parametrize("path", gloo_ranks.TENSORS)
@pytest.mark.parametrize("bit", [0, 12, 22, 31])
@pytest.mark.parametrize("odd", range(WORLD))
def test_a_flipped_bit_names_tensor_and_rank(seen: list[dict[str, Any]], path: str, bit: int, odd: int) -> None:
    assert seen[0][f"{path} {bit} {odd}"] == f"epoch 3: rank {odd} differs from the majority of {WORLD} in {path}"


def test_generator_and_cursor_count_and_nothing_goes_unhashed(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["cursor"] == f"epoch 3: rank 1 differs from the majority of {WORLD} in cursor/next and 1 more"
    assert "rank 2 differs" in seen[0]["unhashable"]


@pytest.mark.parametrize("faulty", range(WORLD))
def test_neighbours_name_the_wrong_gradient(seen: list[dict[str, Any]], faulty: int) -> None:
    for rank in range(WORLD):
        clean = seen[rank][f"buddies none {faulty}"]
        assert (clean["kind"], clean["culprits"], clean["calls"]) == ("", [], 1)
        for kind in ("transient", "transient check", "persistent"):
            found = seen[rank][f"buddies {kind} {faulty}"]
            assert (found["kind"], found["culprits"], found["name"]) == (kind.split()[0], [faulty], "b")


def test_sums_do_not_depend_on_the_order_of_ranks(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["sum"] == seen[0]["sum swapped"]
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) * 10.0**rank for rank in range(WORLD)]
    expected = torch.stack(parts).double().sum(0).float()
    assert torch.allclose(torch.tensor(seen[0]["sum"], dtype=torch.int32).view(torch.float32), expected, rtol=1e-6, atol=1e-5)
    assert seen[0]["sum zero"] == [0, 0, 0]
    assert "not finite" in seen[0]["sum nan"]
