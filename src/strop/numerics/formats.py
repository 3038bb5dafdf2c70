"""Number formats, emulated: values are rounded to what the format can hold and stay float32. Pure functions of torch tensors.

Scaled formats (``int8``, ``mxfp8``, ``nvfp4``) take a scale per token row (``token``) or one for the whole call (``tensor``). The latter is
how fast kernels often do it, and it ties a row to its batch mates and to tokens that come after it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

FormatName = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "int8", "mxfp8", "nvfp4"]
ScaleName = Literal["token", "tensor"]

FORMATS: tuple[FormatName, ...] = ("fp64", "fp32", "tf32", "bf16", "fp16", "int8", "mxfp8", "nvfp4")
OUTPUT: dict[str, FormatName] = {"bf16": "bf16", "fp16": "fp16", "int8": "bf16", "mxfp8": "bf16", "nvfp4": "bf16"}
"""Format of an operation's result; products are accumulated in float32 inside, as matrix units do."""

MX_BLOCK, NV_BLOCK = 32, 16
E4M3_MAX, E2M1_MAX = 448.0, 6.0
E2M1_LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# Between two levels lies a border; a value on it goes to the even neighbour, so every second border belongs to the upper side.
_BORDERS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_UPPER = torch.tensor([False, True, False, True, False, True, False])
E2M1_BORDERS = torch.where(_UPPER, torch.nextafter(_BORDERS, torch.zeros(7)), _BORDERS)


def round_to(x: Tensor, kind: str, scale: ScaleName = "token") -> Tensor:
    """Return ``x`` rounded to a format along its last dimension, float32 (as it is for ``fp32`` and ``fp64``).

    Source: TF32: 10 mantissa bits; E4M3 and MX blocks of 32 with a power-of-two scale: OCP Microscaling Formats v1.0, section 6.3; NVFP4:
    E2M1 in blocks of 16 with an E4M3 scale each and one float32 scale above them, ``amax / (6 * 448)``.

    Args:
        x: ``[..., K]``; rows are tokens for activations and output channels for weights.
        kind: One of ``FORMATS``.
        scale: Whether scales span a row or the whole tensor.

    Raises:
        ValueError: Unknown format.
    """
    if kind in ("fp32", "fp64"):
        return x
    if kind == "tf32":
        return _mantissa(x, 10)
    if kind in ("bf16", "fp16"):
        return x.to(torch.bfloat16 if kind == "bf16" else torch.float16).to(x.dtype)
    if kind not in FORMATS:
        raise ValueError(f"number format {kind!r}; expected one of {', '.join(FORMATS)}")
    if not x.numel():
        return x
    # What isn't finite stays what it is: a fault must not be rounded away.
    return torch.where(torch.isfinite(x), _scaled(x, kind, scale), x)


def _scaled(x: Tensor, kind: str, scale: ScaleName) -> Tensor:
    if kind == "nvfp4":
        return _nvfp4(x, scale)
    if kind == "mxfp8" and scale == "token":
        return _mxfp8(x)
    largest = 127.0 if kind == "int8" else E4M3_MAX
    unit = _span(x, scale) / largest
    inside = _safe(x, unit)
    return (inside.round().clamp(-127, 127) if kind == "int8" else _e4m3(inside)) * unit


def _mantissa(x: Tensor, bits: int) -> Tensor:
    """Round float32 to ``bits`` explicit mantissa bits, ties to even; infinities and NaN stay."""
    drop = 23 - bits
    raw = x.float().contiguous().view(torch.int32)
    even = (raw >> drop) & 1
    rounded = ((raw + ((1 << (drop - 1)) - 1) + even) >> drop) << drop
    return torch.where(torch.isfinite(x), rounded.view(torch.float32).to(x.dtype), x)


def _span(x: Tensor, scale: ScaleName) -> Tensor:
    """Largest size of each row, ``[..., 1]``, or of the tensor, ``[1]``."""
    return x.abs().amax(-1, keepdim=True) if scale == "token" else x.abs().max().reshape(1)


def _safe(x: Tensor, unit: Tensor) -> Tensor:
    """``x / unit``; zero where the unit is."""
    return torch.where(unit > 0, x / torch.where(unit > 0, unit, torch.ones_like(unit)), torch.zeros_like(x))


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype)


def _blocks(x: Tensor, size: int) -> Tensor:
    """``[..., K] -> [..., ceil(K / size), size]``, zeros behind the end."""
    missing = -x.shape[-1] % size
    padded = torch.nn.functional.pad(x, (0, missing)) if missing else x
    return padded.reshape(*x.shape[:-1], -1, size)


def _mxfp8(x: Tensor) -> Tensor:
    parts = _blocks(x, MX_BLOCK)
    largest = parts.abs().amax(-1, keepdim=True)
    # The scale is 2^(floor(log2 amax) - 8), 8 being the exponent of E4M3's largest value.
    exponent = torch.frexp(largest)[1] - 1 - 8
    unit = torch.ldexp(torch.ones_like(largest), exponent)
    return (_e4m3(_safe(parts, unit)) * unit).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]


def _nvfp4(x: Tensor, scale: ScaleName) -> Tensor:
    above = (_span(x, scale) / (E2M1_MAX * E4M3_MAX)).unsqueeze(-1)
    parts = _blocks(x, NV_BLOCK)
    unit = _e4m3(_safe(parts.abs().amax(-1, keepdim=True) / E2M1_MAX, above)) * above
    return (_e2m1(_safe(parts, unit)) * unit).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]


def _e2m1(x: Tensor) -> Tensor:
    index = torch.searchsorted(E2M1_BORDERS.to(x.device), x.abs().float().contiguous())
    return E2M1_LEVELS.to(x.device)[index].to(x.dtype) * x.sign()
