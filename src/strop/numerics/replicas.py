"""Checks between the ranks of a data-parallel group (``torch.distributed``, any back end that gathers CPU tensors).

- ``check_replicas``: state that must be equal bit for bit is; the odd rank is named.
- ``check_buddies``: every gradient is computed a second time by the neighbour before anything is reduced, since after the reduction a
  wrong gradient is everybody's.
- ``exact_all_reduce``: a sum whose bits don't depend on the order or number of hops.

Each check gathers first and raises afterwards on every rank alike, so that no rank waits for one that has given up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from strop.core.errors import NumericsError
from strop.numerics.manifest import Vote, tensor_digests, vote

Gradients = Mapping[str, Tensor]


def gather_json(value: Any, group: Any = None) -> list[Any]:
    """Return every rank's JSON value by rank. Plain bytes on the wire: nothing of another rank is unpickled."""
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    world = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(own)]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(own)] = own
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(parts, padded, group=group)
    return [json.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]


def vote_on(state: Mapping[str, Any], group: Any = None) -> Vote:
    """Hash ``state`` on every rank and vote. A leaf that one rank can't hash is an odd leaf of that rank."""
    try:
        digests = tensor_digests(state)
    except NumericsError as error:
        digests = {"unhashable": str(error)}
    return vote(gather_json(digests, group))


def check_replicas(state: Mapping[str, Any], what: str, group: Any = None) -> Vote:
    """Vote and fail closed.

    Args:
        state: Replicated state: weights, buffers, master weights, moments, generator states, data cursor.
        what: Names the occasion, for example ``"end of epoch 3"``.
        group: The replicas; by default all ranks.

    Raises:
        NumericsError: On every rank, if any leaf differs anywhere; names the odd rank and the leaf.
    """
    result = vote_on(state, group)
    if not result.is_equal:
        raise NumericsError(f"{what}: {result.text()}", ids={"ranks": ",".join(map(str, result.odd))})
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class BuddyVerdict:
    """What the neighbours found.

    Attributes:
        culprits: Ranks whose result is wrong; more than one where it can't be told.
        kind: ``""`` (all agree), ``"transient"`` (the same rank got another result when it tried again), ``"persistent"``, ``"undecided"``.
        name: First gradient that differs.
    """

    culprits: tuple[int, ...] = ()
    kind: Literal["", "transient", "persistent", "undecided"] = ""
    name: str = ""


def check_buddies(own: Gradients, recompute: Callable[[int], Gradients], group: Any = None) -> BuddyVerdict:
    """Let every rank compute its right neighbour's gradient as well and compare digests; on a difference both do it once more.

    Args:
        own: This rank's gradients, before any reduction.
        recompute: ``rank -> gradients`` of that rank's micro-batch, computed here and now.
        group: The replicas; by default all ranks. One rank checks itself.

    Returns:
        The same verdict on every rank. It raises nothing: the caller decides whether to redo the step, leave a rank out or stop.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    right = (rank + 1) % world
    first = gather_json([_digests(own), _digests(recompute(right))], group)
    broken = [r for r in range(world) if first[r][0] != first[(r - 1) % world][1]]
    if not broken:
        return BuddyVerdict()
    again = gather_json([_digests(recompute(rank)), _digests(recompute(right))], group)
    return _judge(first, again, broken)


def _judge(first: list[Any], again: list[Any], broken: list[int]) -> BuddyVerdict:
    """Name who is wrong. ``first`` and ``again`` hold ``[own, neighbour's]`` digests by rank; ``broken`` the ranks contradicted."""
    world = len(first)
    name = next(iter(sorted(_differing(first[broken[0]][0], first[(broken[0] - 1) % world][1]))))
    transient = [r for r in range(world) if first[r] != again[r]]
    if transient:
        return BuddyVerdict(culprits=tuple(transient), kind="transient", name=name)
    # A rank that is always wrong contradicts both neighbours: the one that checks it and the one that it checks.
    both = [r for r in broken if (r + 1) % world in broken]
    if world >= 3 and len(both) == 1:
        return BuddyVerdict(culprits=tuple(both), kind="persistent", name=name)
    suspects = sorted({r for b in broken for r in (b, (b - 1) % world)})
    return BuddyVerdict(culprits=tuple(suspects), kind="undecided", name=name)


def _digests(gradients: Gradients) -> dict[str, str]:
    return tensor_digests(dict(gradients))


def _differing(one: Mapping[str, str], two: Mapping[str, str]) -> set[str]:
    return {name for name in set(one) | set(two) if one.get(name) != two.get(name)}


def exact_all_reduce(values: Tensor, group: Any = None) -> Tensor:
    """Return the sum over ranks, with the same bits for every order of ranks and every algorithm of the network.

    The values are summed as 64-bit integers on a common grid, fine enough that a value of the largest one's size loses nothing: float32
    values above ``2^-36`` of the largest are exact with up to 8 ranks.

    Args:
        values: ``float32`` or ``float64``, any shape, equal on all ranks.
        group: The ranks; by default all.

    Raises:
        NumericsError: A value on any rank isn't finite (on every rank alike).
    """
    largest = values.abs().max().double() if values.numel() else torch.zeros((), dtype=torch.float64)
    bound = torch.where(torch.isfinite(largest), largest, torch.full_like(largest, torch.inf)).cpu().reshape(1)
    dist.all_reduce(bound, op=dist.ReduceOp.MAX, group=group)
    if not math.isfinite(float(bound)):
        raise NumericsError("a value to be summed over ranks is not finite; nothing was reduced")
    if float(bound) == 0:
        return torch.zeros_like(values)
    headroom = 62 - math.ceil(math.log2(dist.get_world_size(group) + 1))
    shift = headroom - math.frexp(float(bound))[1]
    grid = torch.ldexp(values.double().cpu(), torch.tensor(shift)).round().to(torch.int64)
    dist.all_reduce(grid, group=group)
    return torch.ldexp(grid.double(), torch.tensor(-shift)).to(values.dtype).to(values.device)
