"""The key-value cache: blocks of 16 tokens that streams share for as long as they have a prefix in common.

Owned by the engine, read and written by the kernels. numpy only.

Shape legend as in ``decoder``: L layers, G key-value heads, C head dim (rounded up to 16).
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from strop.core.errors import EngineError
from strop.model.config import DecoderConfig
from strop.model.native.bindings import padded

BLOCK = 16
"""Tokens of a block."""
HUGE = 2 << 20
"""Bytes of a huge page."""


def aligned_zeros(count: int) -> np.ndarray:
    """Return ``float32 [count]`` zeros on huge pages where the system has them; memory is taken when it is first written."""
    room = mmap.mmap(-1, 4 * count + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            room.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(room, np.float32)
    start = (-raw.ctypes.data % HUGE) // 4
    return raw[start : start + count]


class KVCache:
    """Keys and values of ``slots`` streams of up to ``max_tokens`` tokens; the caller knows how many are valid.

    A stream begins with a row at position 0, which forgets what its slot held. Rows go on from any position not beyond the last one fed.
    Full blocks of a copied prefix are shared and only copied when a stream writes into one; streams never see each other.

    Layout: keys ``[L, G, blocks, C, 16]``, values ``[L, G, blocks, 16, C]``, ``table int32 [slots, max_tokens/16]`` (-1: no block).
    """

    def __init__(self, config: DecoderConfig, slots: int, max_tokens: int) -> None:
        if slots < 1 or max_tokens < 1:
            raise EngineError(f"a key-value cache needs at least one slot and one token, got {slots} and {max_tokens}")
        self.slots, self.max_tokens = slots, max_tokens
        width = padded(max_tokens) // BLOCK
        self.num_blocks = slots * width
        shape = (config.num_layers, config.num_kv_heads, self.num_blocks, BLOCK * padded(config.head_dim))
        self.keys, self.values = (aligned_zeros(int(np.prod(shape))).reshape(shape) for _ in range(2))
        self.table = np.full((slots, width), -1, np.int32)
        self._users = np.zeros(self.num_blocks, np.int32)
        self._filled = np.zeros(slots, np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes when every slot is full."""
        return self.keys.nbytes + self.values.nbytes

    def free(self, slot: int) -> None:
        """Forget a stream, so that its blocks can be used by others. Idempotent; a new stream does it by itself."""
        self._check("slot", slot, self.slots)
        count = self._filled[slot]
        self._users[self.table[slot, :count]] -= 1
        self.table[slot, :count] = -1
        self._filled[slot] = 0

    def copy_prefix(self, src_slot: int, dst_slot: int, n: int) -> None:
        """Let ``dst_slot`` begin with the first ``n`` tokens of ``src_slot``; what it held is forgotten.

        Raises:
            EngineError: A slot outside the cache, or more tokens than ``src_slot`` was ever fed.
        """
        self._check("src_slot", src_slot, self.slots)
        self._check("dst_slot", dst_slot, self.slots)
        self._check("n", n, min(self.max_tokens, int(self._filled[src_slot]) * BLOCK) + 1)
        if src_slot == dst_slot:
            return
        self.free(dst_slot)
        full, rest = divmod(n, BLOCK)
        shared = self.table[src_slot, :full]
        self.table[dst_slot, :full] = shared
        self._users[shared] += 1
        self._filled[dst_slot] = full
        if rest:
            self._copy_block(int(self.table[src_slot, full]), self._take(dst_slot, full))

    def prepare(self, positions: np.ndarray, slots: np.ndarray, firsts: np.ndarray) -> None:
        """Give every row a block that only its stream uses. Called by the model before the rows are written.

        Args:
            positions: ``int32 [R]``.
            slots: ``int32 [R]``.
            firsts: Rows at which a slot's rows begin.

        Raises:
            EngineError: A row would leave a gap in its stream.
        """
        for row in firsts[positions[firsts] == 0]:
            self.free(int(slots[row]))
        starts = firsts[positions[firsts] > self._filled[slots[firsts]] * BLOCK]
        if len(starts):
            row = int(starts[0])
            raise EngineError(f"row {row}: slot {slots[row]} was never fed the positions before {positions[row]}")
        index = positions // BLOCK
        blocks = self.table[slots, index]
        for row in np.flatnonzero((blocks < 0) | (self._users[blocks] > 1)):
            slot, at = int(slots[row]), int(index[row])
            old = int(self.table[slot, at])
            if old < 0:
                self._take(slot, at)
            elif self._users[old] > 1:
                self._users[old] -= 1
                self._copy_block(old, self._take(slot, at))

    def _take(self, slot: int, at: int) -> int:
        # A slot's own place first: blocks that lie one behind the other are read as one.
        block = slot * self.table.shape[1] + at
        if self._users[block]:
            block = int(np.argmin(self._users))
        self._users[block] = 1
        self.table[slot, at] = block
        self._filled[slot] = max(self._filled[slot], at + 1)
        return block

    def _copy_block(self, source: int, target: int) -> None:
        self.keys[:, :, target] = self.keys[:, :, source]
        self.values[:, :, target] = self.values[:, :, source]

    @staticmethod
    def _check(name: str, value: int, end: int) -> None:
        if not 0 <= value < end:
            raise EngineError(f"key-value cache: {name} {value} is outside 0..{end - 1}")
