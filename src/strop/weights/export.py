"""Export of the trainer's weights to an engine in the same process, checked by digest: what was sent is what is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.core.errors import WeightsError
from strop.numerics.digest import weights_digest

if TYPE_CHECKING:
    from strop.engine.embedded import EmbeddedEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsRef:
    """Names weights exactly.

    Attributes:
        version: Policy version.
        digest: Hex digest over names, shapes and bytes.
    """

    version: int
    digest: str


def export_weights(weights: Mapping[str, Any], version: int) -> tuple[WeightsRef, dict[str, Any]]:
    """Return a copy of ``weights`` that later training steps don't change, with its name.

    Args:
        weights: Under Hugging Face names, for example ``trainer.weights()``; tensors that share memory stay tied.
        version: Their policy version.
    """
    copies: dict[int, Any] = {}
    frozen: dict[str, Any] = {}
    for name, tensor in weights.items():
        pointer = tensor.data_ptr()
        if pointer not in copies or copies[pointer].shape != tensor.shape:
            copies[pointer] = tensor.detach().clone().contiguous()
        frozen[name] = copies[pointer]
    return WeightsRef(version=version, digest=weights_digest(frozen)), frozen


def check_weights(weights: Mapping[str, Any], ref: WeightsRef) -> None:
    """Hold weights against their name.

    Raises:
        WeightsError: The digest differs.
    """
    actual = weights_digest(weights)
    if actual != ref.digest:
        raise WeightsError(f"weights of version {ref.version} have the digest {actual}, expected {ref.digest}: they changed on the way")


async def send_weights(
    engine: EmbeddedEngine, weights: Mapping[str, Any], version: int, *, drain: bool = False, verify: bool = True
) -> WeightsRef:
    """Snapshot ``weights``, swap them into ``engine``, and return their name.

    Args:
        engine: Gets the snapshot; it never sees later training steps.
        weights: Under Hugging Face names.
        version: What later tokens carry.
        drain: Let running requests finish first.
        verify: Check in the engine that what arrived is what was sent.

    Raises:
        WeightsError: What arrived differs from what was sent.
        EngineError: The engine can't take them.
    """
    ref, frozen = export_weights(weights, version)
    await engine.swap(frozen, version, drain=drain, digest=ref.digest if verify else None)
    return ref
