"""The embedded engine: continuous batching over one model in this process.

One pump task on the event loop owns all state. It plans a step, lets the model compute it (in a worker thread, so that tools go on), and
hands out the sampled tokens; between two steps it runs jobs: weight swaps, recomputations. Callers wait on futures, each with a deadline.

Determinism: a token depends on (seed, key, position) and on its stream's tokens and weights. With an exact model no result depends on batch
mates, chunking, copied prefixes or timing.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from strop.core.config import EngineConfig
from strop.core.episode import EpisodeKey, Trace
from strop.core.errors import EngineError, StropError
from strop.engine.backend import Cache, ModelBackend, default_cache
from strop.engine.compute import compute_step
from strop.engine.counters import EngineCounters
from strop.engine.jobs import Deadlines, Job, Stuck
from strop.engine.recompute import recompute_trace
from strop.engine.scheduler import Plan, PrefixIndex, plan_step
from strop.engine.session import EmbeddedSession
from strop.engine.slots import SlotPool
from strop.engine.stream import Request, Stream, stream_shape
from strop.numerics.digest import weights_digest
from strop.ports import EngineCapabilities, Generation


class EmbeddedEngine:
    """See ``strop.ports.Engine``.

    Args:
        config: Sessions, batch, context and chunk sizes.
        model: The model; this engine is its only caller.
        seed: The run's seed.
        version: Version of the weights that ``model`` holds.
        make_cache: ``(slots, max_tokens) -> Cache``; by default the cache of ``strop.model.inference``.
        is_exact: Whether the model's results are independent of batch and chunking, bit for bit.
        offload: Compute in a worker thread. Off, the event loop stands still during a step.
        deadlines: Longest waits.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelBackend,
        *,
        seed: int,
        version: int = 0,
        make_cache: Callable[[int, int], Cache] | None = None,
        is_exact: bool = True,
        offload: bool = True,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.config, self.seed, self.version = config, seed, version
        self.loaded_digest = ""  # of the weights as the engine read them at the last swap
        self.deadlines = deadlines or Deadlines()
        self.counters = EngineCounters()
        self.capabilities = EngineCapabilities(returns_logprobs=True, returns_routes=True, swaps_in_flight=True, is_exact=is_exact)
        self._model, self._offload, self._shape = model, offload, stream_shape(model.config)
        self._make_cache = make_cache or default_cache(model)
        self._cache = self._make_cache(config.max_sessions, config.max_tokens)
        self._scratch: Cache | None = None
        self._slots = SlotPool(config.max_sessions, self.deadlines.open_s)
        self._streams: set[Stream] = set()
        self._running: dict[Stream, Request] = {}
        self._jobs: deque[Job] = deque()
        self._index = PrefixIndex()
        self._arrivals = self._tickets = 0
        self._failure: BaseException | None = None
        self._is_closed = False
        self._pump: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="strop-engine") if offload else None

    # ------------------------------------------------------------------------------------------------ the port

    async def open(self, key: EpisodeKey) -> EmbeddedSession:
        """Start an empty stream. Raises ``EngineError``: closed or broken, or no slot came free within ``deadlines.open_s``."""
        self.check_alive()
        slot = await self._slots.take(key)
        self._index.drop(slot)
        stream = Stream(key, slot, max_tokens=self.config.max_tokens, **self._shape)
        self._streams.add(stream)
        return EmbeddedSession(self, stream)

    async def swap(self, weights: Mapping[str, Any], version: int, *, drain: bool = False, digest: str | None = None) -> None:
        """Load ``weights`` between two steps.

        Args:
            weights: Under Hugging Face names; not kept, and not changed by the caller until this returns.
            version: What later tokens carry.
            drain: Let running ``generate`` calls finish first and hold new ones back; otherwise running streams go on with their cache.
            digest: Digest of the weights as they were sent; checked before loading.

        Raises:
            WeightsError: The digest differs; the old weights stay.
            EngineError: The engine is closed or broken, or the swap had to wait too long.
        """

        def load() -> None:
            if digest is not None:
                from strop.weights.export import WeightsRef, check_weights

                check_weights(weights, WeightsRef(version=version, digest=digest))
            found = digest if digest is not None else weights_digest(weights)  # before loading: an error leaves the engine as it was
            self._model.load(weights)
            self.loaded_digest = found

        def loaded() -> None:
            self.version = version
            self._index.clear()
            self._slots.make_stale()
            for stream in self._streams:
                stream.is_shareable = stream.computed == 0
            self.counters.swaps += 1
            self.counters.swaps_in_flight += bool(self._running)

        await self._run_job(load, f"swap to version {version}", drain=drain, done=loaded)

    def metrics(self) -> Mapping[str, float]:
        """What it did since the last call."""
        return self.counters.take()

    async def close(self) -> None:
        """Stop, fail what still waits and give all slots back. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pump is not None and not self._pump.done():
            for late in (await asyncio.wait({self._pump}, timeout=self.deadlines.close_s))[1]:
                late.cancel()
        self._fail(EngineError("the engine was closed"))
        for stream in list(self._streams):
            self.release(stream)
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------------ beyond the port

    async def recompute(
        self,
        trace: Trace,
        *,
        temperature: float = 1.0,
        key: EpisodeKey | None = None,
        weights_for: Callable[[int], Mapping[str, Any]] | None = None,
    ) -> Trace:
        """Feed a whole stream again and return it with fresh log-probabilities and routes. Running sessions are not disturbed.

        Args:
            trace: The recorded stream.
            temperature: That of the log-probabilities.
            key: Draw the sampled tokens again with this key: ``token_ids`` of the result are then what the engine would have sampled
                after the recorded prefix. ``None`` keeps the recorded tokens.
            weights_for: Weights of a version: each row is computed under the version that the trace records for it, as in the original run
                with its in-flight swaps. It must know the engine's current version too, which is loaded again at the end. ``None`` uses the
                current weights for all rows.

        Returns:
            A trace with the same mask; versions as recorded if ``weights_for`` is given, otherwise the current one.

        Raises:
            EngineError: The stream doesn't fit the context, or the engine is closed or broken.
        """
        if len(trace) > self.config.max_tokens:
            raise EngineError(
                f"a trace of {len(trace)} tokens does not fit the context of {self.config.max_tokens} tokens (engine.max_tokens)"
            )
        if self._scratch is None:
            self._scratch = self._make_cache(1, self.config.max_tokens)
        scratch = self._scratch

        def run() -> Trace:
            return recompute_trace(
                self._model,
                scratch,
                trace,
                seed=self.seed,
                version=self.version,
                temperature=temperature,
                key=key,
                weights_for=weights_for,
                chunk=self.config.prefill_rows,
            )

        result = await self._run_job(run, f"recompute {len(trace)} tokens")
        self.counters.recomputed_tokens += len(trace)
        return result

    @property
    def vocab_size(self) -> int:
        """Token ids lie in ``[0, vocab_size)``."""
        return self._model.config.vocab_size

    def check_alive(self) -> None:
        """Raise ``EngineError`` if the engine is closed or broken."""
        if self._failure is not None:
            raise EngineError(f"the engine is broken: {self._failure}") from self._failure
        if self._is_closed:
            raise EngineError("the engine was closed")

    def next_arrival(self) -> int:
        """Number of the next request."""
        self._arrivals += 1
        return self._arrivals

    async def run_request(self, stream: Stream, request: Request) -> Generation:
        """Let the pump serve ``request``; used by sessions."""
        stream.request = request
        self._running[stream] = request
        self._start_pump()
        try:
            async with asyncio.timeout(self.deadlines.generate_s):
                return await request.future
        except TimeoutError:
            self.release(stream)
            raise EngineError(
                f"waited {self.deadlines.generate_s:g} s for tokens of {stream.key}: {len(request.sampled)} of {request.max_new_tokens} "
                f"sampled, {stream.pending} tokens pending, {len(self._running)} other requests running, {self.counters.steps} steps done",
                retryable=True,
                ids={"session": str(stream.key)},
            ) from None
        except asyncio.CancelledError:
            self.release(stream)
            raise
        finally:
            self._running.pop(stream, None)
            stream.request = None

    def release(self, stream: Stream) -> None:
        """Give the slot of ``stream`` back; idempotent."""
        if stream.is_closed:
            return
        stream.is_closed = True
        self._streams.discard(stream)
        request = self._running.pop(stream, None)
        stream.request = None
        if request is not None and not request.future.done():
            request.future.set_exception(EngineError(f"session {stream.key} was closed while generating", ids={"session": str(stream.key)}))
        self._slots.give(stream.slot, is_stale=not self._index.lends(stream))

    # ------------------------------------------------------------------------------------------------ jobs

    async def _run_job(self, run: Callable[[], Any], what: str, *, drain: bool = False, done: Callable[[], None] | None = None) -> Any:
        self.check_alive()
        job = Job(run, asyncio.get_running_loop().create_future(), what, drain, done)
        self._jobs.append(job)
        self._start_pump()
        try:
            async with asyncio.timeout(self.deadlines.job_s):
                return await job.future
        except TimeoutError:
            raise EngineError(
                f"waited {self.deadlines.job_s:g} s for {what}: {len(self._running)} requests running, {len(self._jobs)} jobs queued",
                retryable=True,
            ) from None
        finally:
            if job in self._jobs and not job.is_running:
                self._jobs.remove(job)

    # ------------------------------------------------------------------------------------------------ the pump

    def _start_pump(self) -> None:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._pump_until_idle(), name="strop-engine-pump")

    async def _pump_until_idle(self) -> None:
        """Work while there is any; ends when idle, so that no task outlives its event loop."""
        try:
            while not self._is_closed and (self._running or self._jobs):
                if await self._run_ready_job():
                    continue
                plan = self._plan()
                if plan is not None:
                    await self._step(plan)
                elif self._running or self._jobs:
                    raise EngineError(f"nothing can be computed for {len(self._running)} requests and {len(self._jobs)} jobs")
        except asyncio.CancelledError:
            self._fail(EngineError("the event loop of the engine was stopped"))
            raise
        except BaseException as error:
            self._failure = error
            self._fail(EngineError(f"the engine broke after {self.counters.steps} steps: {type(error).__name__}: {error}"), error)

    def _plan(self) -> Plan | None:
        limits = {"max_batch": self.config.max_batch, "prefill_rows": self.config.prefill_rows}
        return plan_step(self._running, self._index, **limits, allow_new=not self._jobs)  # so that a waiting job can't starve

    async def _run_ready_job(self) -> bool:
        """Run the first job if no stream is in the middle of what it was fed (and, to drain, no request has started)."""
        if not self._jobs:
            return False
        job = self._jobs[0]
        if any(request.is_started if job.drain else stream.is_mid_feed for stream, request in self._running.items()):
            return False
        job.is_running = True
        try:
            result = await self._in_thread(job.run, job.what)
        except StropError as error:
            if isinstance(error, Stuck):
                raise
            self._jobs.popleft()  # the job's own fault: the engine goes on with its old weights
            if not job.future.done():
                job.future.set_exception(error)
            return True
        self._jobs.popleft()
        if job.done is not None:
            job.done()
        if not job.future.done():
            job.future.set_result(result)
        return True

    async def _step(self, plan: Plan) -> None:
        for copy in plan.copies:
            copy.stream.mark_computed(copy.count, copy.source.routes[: copy.count], self.version)
            copy.stream.cached_tokens += copy.count
            self.counters.cached_tokens += copy.count
        for segment in plan.segments:
            segment.request.is_started = True
        started, cpu_started = time.perf_counter(), time.process_time()
        stale, counters, what = self._slots.take_stale(), self.counters, f"a step of {len(plan.rows.token_ids)} rows"
        expert_ids, tokens, logprobs = await self._in_thread(
            lambda: compute_step(self._model, self._cache, plan, stale, version=self.version), what
        )
        counters.busy_s += time.perf_counter() - started
        counters.cpu_s += time.process_time() - cpu_started
        counters.steps += 1
        counters.rows += len(expert_ids)
        counters.decode_rows += len(tokens)
        self._hand_out(plan, expert_ids, tokens, logprobs)

    def _hand_out(self, plan: Plan, expert_ids: np.ndarray, tokens: list[int], logprobs: list[float]) -> None:
        counters, version = self.counters, self.version
        for stream, request, start, count, want in plan.segments:
            if stream.request is not request:  # cancelled meanwhile
                continue
            self._tickets += 1
            request.ticket = self._tickets
            if request.sampled:
                stream.append_decoded(tokens[want], logprobs[want], version, expert_ids[start])
            else:
                counters.prefill_tokens += count - int(stream.mask[stream.computed])
                stream.mark_computed(count, expert_ids[start : start + count], version)
                if want < 0:
                    continue
                self._index.register(stream)
                stream.append_sampled(tokens[want], logprobs[want], version)
            token = tokens[want]
            request.sampled.append(token)
            counters.decode_tokens += 1
            if token in request.stop_ids or len(request.sampled) == request.max_new_tokens:
                self._finish(stream, request, "stop" if token in request.stop_ids else "length")

    def _finish(self, stream: Stream, request: Request, reason: str) -> None:
        self._index.register(stream)
        self._running.pop(stream, None)
        stream.request = None
        if not request.future.done():
            request.future.set_result(Generation(token_ids=np.array(request.sampled, np.int32), finish_reason=reason))

    async def _in_thread(self, work: Callable[[], Any], what: str) -> Any:
        if self._thread is None:
            result = work()
            await asyncio.sleep(0)  # let the callers of the last step act before the next one is planned
            return result
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        if (await asyncio.wait({future}, timeout=self.deadlines.step_s))[1]:
            raise Stuck(f"waited {self.deadlines.step_s:g} s for {what}")
        return future.result()

    def _fail(self, error: EngineError, cause: BaseException | None = None) -> None:
        """Give every waiting caller its own error."""
        futures: list[asyncio.Future[Any]] = [entry.future for entry in (*self._running.values(), *self._jobs)]
        self._running.clear()
        self._jobs.clear()
        self._slots.fail(error)
        for future in futures:
            if not future.done():
                copy = EngineError(str(error), retryable=False)
                copy.__cause__ = cause
                future.set_exception(copy)
