"""One rank of a real gloo group goes through every scenario and writes what it saw: ``python gloo_ranks.py rank world directory``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from strop.core.errors import NumericsError
from strop.numerics.replicas import check_buddies, check_replicas, exact_all_reduce, gather_json

TENSORS = ("weights/w", "buffers/bias", "optimizer/master/w", "optimizer/first/w", "optimizer/second/w", "gradient/w")


def state() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)
    make = lambda: torch.randn(6, 5, generator=draw)  # noqa: E731
    moments = {"master": {"w": make()}, "first": {"w": make()}, "second": {"w": make().square()}, "steps": 4}
    return {
        "weights": {"w": make()},
        "buffers": {"bias": make()},
        "optimizer": moments,
        "gradient": {"w": make()},
        "generator": torch.Generator().manual_seed(3),
        "cursor": {"step": 4, "next": 96},
    }


def flip(node: dict[str, Any], path: str, bit: int) -> None:
    for part in path.split("/"):
        node = node[part]
    node.view(torch.int32).view(-1)[7] ^= (1 << bit) if bit < 31 else -(2**31)  # type: ignore[union-attr]


def said(call: Any) -> str:
    try:
        call()
    except NumericsError as error:
        return str(error)
    return ""


def gradient(rank: int, fault: float = 0.0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 + rank)
    return {"a": torch.randn(4, generator=draw), "b": torch.randn(3, generator=draw) + fault}


def buddies(rank: int, faulty: int, kind: str) -> dict[str, Any]:
    """A rank whose arithmetic is wrong once, or always."""
    calls = 0

    def recompute(of: int) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        is_wrong = rank == faulty and (kind == "persistent" or (kind == "transient check" and calls == 1))
        return gradient(of, 1e-6 if is_wrong else 0.0)

    is_wrong = rank == faulty and kind in ("persistent", "transient")
    verdict = check_buddies(gradient(rank, 1e-6 if is_wrong else 0.0), recompute)
    return {"culprits": list(verdict.culprits), "kind": verdict.kind, "name": verdict.name, "calls": calls}


def scenarios(rank: int, world: int) -> dict[str, Any]:
    seen: dict[str, Any] = {"gathered": gather_json({"rank": rank, "text": "ü" * rank})}
    seen["clean"] = said(lambda: check_replicas(state(), "clean"))
    for path in TENSORS:
        for bit in (0, 12, 22, 31):
            for odd in range(world):
                mine = state()
                if rank == odd:
                    flip(mine, path, bit)
                seen[f"{path} {bit} {odd}"] = said(lambda mine=mine: check_replicas(mine, "epoch 3"))
    mine = state()
    if rank == 1:
        torch.rand(1, generator=mine["generator"])
        mine["cursor"]["next"] = 95
    seen["cursor"] = said(lambda: check_replicas(mine, "epoch 3"))
    mine = state() | ({"what": object()} if rank == 2 else {})
    seen["unhashable"] = said(lambda: check_replicas(mine, "epoch 3"))
    for kind in ("none", "transient", "transient check", "persistent"):
        for faulty in range(world):
            seen[f"buddies {kind} {faulty}"] = buddies(rank, faulty, kind)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
    seen["sum"] = exact_all_reduce(values).view(torch.int32).tolist()
    swapped = torch.randn(1000, generator=torch.Generator().manual_seed(world - 1 - rank)) * 10.0 ** (world - 1 - rank)
    seen["sum swapped"] = exact_all_reduce(swapped).view(torch.int32).tolist()
    seen["sum zero"] = exact_all_reduce(torch.zeros(3)).tolist()
    bad = torch.full((2,), float("nan") if rank == 0 else 1.0)
    seen["sum nan"] = said(lambda: exact_all_reduce(bad))
    return seen


def main() -> None:
    rank, world, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world)
    (directory / f"rank-{rank}.json").write_text(json.dumps(scenarios(rank, world)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
