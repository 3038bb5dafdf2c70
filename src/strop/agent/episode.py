"""One episode: generate, parse, call, observe, until the agent submits or a limit ends it.

Token-exact: the session holds the only stream; sampled ids are kept as they are and observations are appended, never re-encoded.
A malformed action is answered and counted like any other turn, so its tokens train. Failures of the machinery raise typed errors with
the episode's ids; the caller turns them into ``Failed``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from strop.agent.tools import Toolbox, ToolResult
from strop.agent.workspace import TreeCache
from strop.core.episode import Episode, EpisodeKey, Turn
from strop.core.errors import EngineError, SandboxError, StropError, TaskError
from strop.core.task import Task
from strop.ports import Engine, Renderer, SandboxProvider, Session, TaskPool

MACHINERY_DEADLINE_S = 600.0

T = TypeVar("T")


@dataclass(slots=True)
class _Run:
    """State of a running episode."""

    task: Task
    key: EpisodeKey
    session: Session
    toolbox: Toolbox
    renderer: Renderer
    temperature: float
    clock: Callable[[], float]
    started: float
    turns: list[Turn] = field(default_factory=list)
    length: int = 0
    prompt_tokens: int = 0
    sandbox_s: float = 0.0


async def run_episode(
    task: Task,
    key: EpisodeKey,
    *,
    engine: Engine,
    sandbox_provider: SandboxProvider,
    pool: TaskPool,
    renderer: Renderer,
    temperature: float,
    system_prompt: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    cache: TreeCache | None = None,
) -> Episode:
    """Let the policy work on ``task``; returns the episode without an outcome.

    ``changes`` are collected from the box before it is removed. Limits are checked before anything is fed: an observation that doesn't fit,
    with room for one more token, ends the episode as ``"max_tokens"`` and isn't part of the stream (it is still in the last ``Turn``).
    The wall limit depends on the machine; it is meant to be out of reach in a normal run, and its use is visible as ``"wall"``.

    Args:
        task: What to do and within which limits.
        key: Names the episode; sampling depends on it.
        engine: Generates the tokens.
        sandbox_provider: Starts the box.
        pool: Knows the task's base directory.
        renderer: Makes prompts and reads actions.
        temperature: 0 is greedy.
        system_prompt: Whether the stream begins with the system turn.
        clock: Seconds, monotonic.
        cache: Texts of base trees shared with other episodes; a private one by default.

    Raises:
        TaskError: The task can't be played: its prompt doesn't fit its limits, unknown tools or test command.
        SandboxError: The box broke.
        EngineError: Generation broke, or didn't answer within ten minutes.
    """
    ids = {"task": key.task_id, "phase": key.phase, "step": str(key.step), "sample": str(key.sample)}
    try:
        async with contextlib.AsyncExitStack() as stack:
            prompt = renderer.render_start(task, system_prompt=system_prompt)
            if len(prompt) >= task.limits.max_tokens:
                raise TaskError(f"the prompt of {task.task_id} has {len(prompt)} tokens, limits.max_tokens is {task.limits.max_tokens}")
            base = pool.base_dir(task)
            sandbox = await _within(sandbox_provider.start(base), SandboxError, f"starting a box over {base}")
            stack.push_async_callback(sandbox.stop)
            toolbox = Toolbox(task, sandbox, base=base, cache=cache or TreeCache())
            session = await _within(engine.open(key), EngineError, "opening a session")
            stack.push_async_callback(session.close)
            run = _Run(task, key, session, toolbox, renderer, temperature, clock, clock())
            stop_reason = await _loop(run, prompt)
            return _episode(run, stop_reason, sandbox.changes())
    except StropError as error:
        error.ids = {**ids, **error.ids}
        raise
    except OSError as error:  # the agent's own file errors were answered by the tools
        raise SandboxError(f"the box of {key} failed: {type(error).__name__}: {error}", ids=ids) from error


def _episode(run: _Run, stop_reason: str, changes: dict[str, bytes | None]) -> Episode:
    return Episode(
        key=run.key,
        traces=(run.session.trace(),),
        turns=tuple(run.turns),
        stop_reason=stop_reason,
        changes=changes,
        costs=_costs(run),
        stats=_stats(run, stop_reason),
    )


async def _loop(run: _Run, prompt: list[int]) -> str:
    """Play turns until something ends the episode; returns the stop reason."""
    limits, new_ids = run.task.limits, prompt
    stop_ids = list(run.renderer.stop_ids)
    while True:
        result, finish = await _turn(run, new_ids, stop_ids)
        if result.ends:
            return "submitted"
        if len(run.turns) >= limits.max_turns:
            return "max_turns"
        # A cut-off action has no stop token; the stream needs one before the answer.
        new_ids = ([] if finish == "stop" else stop_ids[:1]) + run.renderer.render_observation(result.observation)
        if run.length + len(new_ids) >= limits.max_tokens:
            return "max_tokens"
        if run.clock() - run.started > limits.wall_s:
            return "wall"


async def _turn(run: _Run, new_ids: list[int], stop_ids: list[int]) -> tuple[ToolResult, str]:
    """Sample one action and answer it; appends the turn."""
    limits = run.task.limits
    start = run.length + len(new_ids)
    room = min(limits.max_new_tokens, limits.max_tokens - start)
    began = run.clock()
    generation = await _within(
        run.session.generate(new_ids, max_new_tokens=room, stop_ids=stop_ids, temperature=run.temperature), EngineError, "generating"
    )
    generated = run.clock()
    run.prompt_tokens += len(new_ids)
    run.length = start + len(generation.token_ids)
    call, arguments, text = run.renderer.parse(generation.token_ids.tolist())
    if call:
        result = await _within(run.toolbox.call(call, arguments), SandboxError, f"tool {call[:40]}")
        status = result.status
    else:
        reason = "it was cut off" if generation.finish_reason == "length" else "expected one tool call"
        result = ToolResult(f"error: malformed call: {reason}. Tools: {', '.join(run.task.tools)}", "malformed")
        status = "malformed"
    run.sandbox_s += result.sandbox_s
    run.turns.append(
        Turn(
            trace=0,
            start=start,
            end=run.length,
            call=call,
            arguments=arguments,
            text=text,
            observation=result.observation,
            status=status,
            generate_s=generated - began,
            tool_s=run.clock() - generated,
        )
    )
    return result, generation.finish_reason


async def _within(work: Awaitable[T], error: type[StropError], what: str) -> T:
    """Await ``work``, but not for ever: a hang becomes a retryable error that says what was waited for."""
    try:
        async with asyncio.timeout(MACHINERY_DEADLINE_S):
            return await work
    except TimeoutError:
        raise error(f"{what} took longer than {MACHINERY_DEADLINE_S:g} s", retryable=True) from None


def _stats(run: _Run, stop_reason: str) -> dict[str, float]:
    """Facts that a replay reproduces; times are in the costs.

    ``first_edit_green``: the visible tests passed right after the first edit (absent if they weren't run there).
    ``first_edit_right``: the first edit gave exactly the file whose SHA-256 is ``provenance["gold_sha256"]`` (absent without that key).
    ``killed_<cause>``: test calls that the kernel ended for that cause (absent where there were none).
    """
    tally, turns = run.toolbox.tally, run.turns
    is_submitted = stop_reason == "submitted"
    stats: dict[str, float] = {
        "turns": len(turns),
        "edits": tally.edits,
        "tests": tally.tests,
        "malformed": sum(turn.status == "malformed" for turn in turns),
        "tool_errors": sum(turn.status == "tool_error" for turn in turns),
        "submitted": float(is_submitted),
        "submitted_on_red": float(is_submitted and not tally.is_green),
    }
    stats |= {f"killed_{cause}": float(count) for cause, count in tally.killed.items()}
    if tally.first_edit_green is not None:
        stats["first_edit_green"] = float(tally.first_edit_green)
    gold = run.task.provenance.get("gold_sha256")
    if gold is not None:
        stats["first_edit_right"] = float(tally.first_edit is not None and hashlib.sha256(tally.first_edit[1]).hexdigest() == gold)
    return stats


def _costs(run: _Run) -> dict[str, float]:
    return {
        "cost/prompt_tokens": float(run.prompt_tokens),
        "cost/sampled_tokens": float(run.length - run.prompt_tokens),
        "cost/sandbox_s": run.sandbox_s,
        "rollout/session_wait_s": sum(turn.generate_s for turn in run.turns),
        "env/s": sum(turn.tool_s for turn in run.turns),
    }
