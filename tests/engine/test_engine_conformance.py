"""The conformance suite over every engine we ship, and planted faults that it must notice."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from engine_setups import SETUPS, ScriptedModel, scripted_engine, scripted_setup

from strop.core.episode import Trace, VersionSpan
from strop.core.routes import Routes
from strop.engine.conformance import CHECKS, EngineSetup, run_check
from strop.engine.embedded import EmbeddedEngine
from strop.engine.scheduler import PrefixIndex
from strop.engine.session import EmbeddedSession
from strop.engine.slots import SlotPool
from strop.ports import Engine

# The torch model is slow and adds nothing to checks of waiting and bookkeeping.
MODEL_CHECKS = (
    "results_do_not_depend_on_timing",
    "continuation_equals_one_shot",
    "traces_hold_their_invariants",
    "greedy_takes_the_likeliest_token",
)
MODEL_CHECKS += ("later_tokens_carry_the_version_of_a_swap", "new_sessions_use_the_new_weights_alone")


@pytest.mark.parametrize(("engine", "name"), [(e, n) for e in SETUPS for n in CHECKS if e != "torch" or n in MODEL_CHECKS])
def test_engine_conforms(engine: str, name: str):
    asyncio.run(run_check(name, SETUPS[engine]()))


def test_engine_fits_the_port():
    assert isinstance(scripted_engine()[0], Engine)


# ------------------------------------------------------------------------------------------------ planted faults


def _fails(setup: EngineSetup, name: str, match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        asyncio.run(run_check(name, setup))


def test_notices_sampling_that_depends_on_the_batch(monkeypatch):
    rng = np.random.default_rng(0)
    original = ScriptedModel.sample
    monkeypatch.setattr(ScriptedModel, "sample", lambda self, logits, u, t: original(self, logits, rng.random(len(u)), t))
    _fails(scripted_setup(), "results_do_not_depend_on_batch_mates", "tokens differ")


def test_notices_logits_that_depend_on_the_batch(monkeypatch):
    original = ScriptedModel.infer

    def infer(self, rows, cache, want):
        result = original(self, rows, cache, want)
        result.logits[:] += 1e-4 * len(want) * np.arange(result.logits.shape[1])
        return result

    monkeypatch.setattr(ScriptedModel, "infer", infer)
    _fails(scripted_setup(), "results_do_not_depend_on_batch_mates", "differ")


def test_notices_a_prefix_shared_across_versions(monkeypatch):
    monkeypatch.setattr(PrefixIndex, "clear", lambda self: None)
    _fails(scripted_setup(), "new_sessions_use_the_new_weights_alone", "tokens differ|log-probabilities differ")


def test_notices_a_prefix_of_another_prompt(monkeypatch):
    original = PrefixIndex.match

    def match(self, stream):
        source, count = original(self, stream)
        return source, max(count - 1, 0) if source is None else min(count + 1, source.computed, stream.length - 1)

    monkeypatch.setattr(PrefixIndex, "match", match)
    monkeypatch.setattr("strop.engine.scheduler.common_prefix", lambda one, two: len(one))
    _fails(scripted_setup(), "results_do_not_depend_on_batch_mates", "differ")


def test_notices_a_version_that_is_not_recorded(monkeypatch):
    original = EmbeddedEngine.swap

    async def swap(self, weights, version, **options):
        await original(self, weights, self.version, **options)

    monkeypatch.setattr(EmbeddedEngine, "swap", swap)
    _fails(scripted_setup(), "later_tokens_carry_the_version_of_a_swap", "version")


def test_notices_weights_that_are_not_loaded(monkeypatch):
    monkeypatch.setattr(ScriptedModel, "load", lambda self, weights: None)
    _fails(scripted_setup(), "new_sessions_use_the_new_weights_alone", "differ|nothing")


def test_notices_a_slot_that_is_never_given_back(monkeypatch):
    monkeypatch.setattr("strop.engine.conformance.DEADLINE_S", 0.5)
    monkeypatch.setattr(SlotPool, "give", lambda self, slot: None)
    _fails(scripted_setup(), "a_cancelled_call_gives_its_place_back", "did not finish")


def _altered(trace: Trace, **changes: Any) -> Trace:
    fields = {name: getattr(trace, name) for name in ("token_ids", "loss_mask", "logprobs", "versions", "routes")}
    return Trace(**{**fields, **changes})


def _valid_tail(trace: Trace) -> Trace:
    assert trace.routes is not None
    return _altered(trace, routes=Routes(expert_ids=trace.routes.expert_ids.copy(), valid=np.ones(len(trace.routes), np.bool_)))


@pytest.mark.parametrize(
    ("alter", "match"),
    [
        (lambda t: _altered(t, loss_mask=np.roll(t.loss_mask, 1)), "mask"),
        (lambda t: _altered(t, token_ids=np.roll(t.token_ids, 1).astype(np.int32)), "tokens"),
        (lambda t: _altered(t, logprobs=-t.logprobs), "log-probabilities"),
        (lambda t: _altered(t, logprobs=t.logprobs - np.float32(1)), "log-probabilities of fed"),
        (lambda t: _altered(t, routes=None), "routes"),
        (_valid_tail, "never computed"),
        (lambda t: _altered(t, versions=(VersionSpan(start=0, end=len(t), version=7),)), "version"),
    ],
)
def test_notices_a_wrong_trace(monkeypatch, alter, match):
    original = EmbeddedSession.trace
    monkeypatch.setattr(EmbeddedSession, "trace", lambda self: alter(original(self)) if len(self) else original(self))
    _fails(scripted_setup(), "traces_hold_their_invariants", match)


def test_notices_a_lost_stop_token(monkeypatch):
    original = EmbeddedEngine._finish

    def finish(self, stream, request, reason):
        if reason == "stop":
            request.sampled.pop()
        original(self, stream, request, reason)

    monkeypatch.setattr(EmbeddedEngine, "_finish", finish)
    _fails(scripted_setup(), "generation_ends_where_it_should", "stop id")


def test_notices_an_overflow_that_feeds(monkeypatch):
    original = EmbeddedSession.generate

    async def generate(self, new_ids, **options):
        try:
            return await original(self, new_ids, **options)
        except Exception:
            self._stream.append_fed(list(new_ids)[:1] or [0], 0)
            raise

    monkeypatch.setattr(EmbeddedSession, "generate", generate)
    _fails(scripted_setup(), "a_stream_that_does_not_fit_is_refused_unchanged", "fed tokens")


def test_notices_a_running_call_that_survives_closing(monkeypatch):
    async def close(self):
        return None

    monkeypatch.setattr(EmbeddedEngine, "close", close)
    monkeypatch.setattr("strop.engine.conformance.DEADLINE_S", 1.0)
    _fails(scripted_setup(), "closing_the_engine_fails_running_calls", "expected EngineError|did not finish")
