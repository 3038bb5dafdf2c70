"""What an engine did, for the cost book."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace


@dataclass(kw_only=True, slots=True)
class EngineCounters:
    """Totals since the engine started; subtract two snapshots to get an interval.

    Attributes:
        prefill_tokens: Fed tokens that were computed.
        decode_tokens: Tokens sampled.
        cached_tokens: Fed tokens whose keys, values and routes were copied from another stream.
        recomputed_tokens: Tokens fed by ``recompute``.
        steps: Model calls for sessions.
        decode_rows: Sum over steps of streams that sampled a token.
        rows: Sum over steps of all rows.
        busy_s: Wall seconds inside the model.
        cpu_s: Processor seconds of the whole process meanwhile (includes tool calls that ran beside it).
        swaps: Weight swaps.
        swaps_in_flight: Those with requests running.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    decode_rows: int = 0
    rows: int = 0
    busy_s: float = 0.0
    cpu_s: float = 0.0
    swaps: int = 0
    swaps_in_flight: int = 0
    _taken: EngineCounters | None = field(default=None, repr=False, compare=False)

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call of ``take``, or since the start."""
        done = self - (self._taken or EngineCounters())
        self._taken = self.snapshot()
        return done.metrics()

    def __sub__(self, earlier: EngineCounters) -> EngineCounters:
        names = [f.name for f in fields(self) if not f.name.startswith("_")]
        return EngineCounters(**{name: getattr(self, name) - getattr(earlier, name) for name in names})

    def snapshot(self) -> EngineCounters:
        """A copy that stays as it is."""
        return replace(self, _taken=None)

    @property
    def batch_rows(self) -> float:
        """Mean number of streams that sampled a token in a step."""
        return self.decode_rows / self.steps if self.steps else 0.0

    def metrics(self) -> dict[str, float]:
        """Values under the keys of ``strop.core.metrics``."""
        busy = max(self.busy_s, 1e-9)
        return {
            "cost/cached_tokens": float(self.cached_tokens),
            "cost/generate_cpu_s": self.cpu_s,
            "rollout/batch_rows": self.batch_rows,
            "rollout/decode_tokens_per_s": self.decode_tokens / busy,
            "rollout/generate_s": self.busy_s,
            "rollout/prefill_tokens_per_s": self.prefill_tokens / busy,
            "rollout/reused_tokens": float(self.cached_tokens),
            "rollout/swaps": float(self.swaps_in_flight),
        }
