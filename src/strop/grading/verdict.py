"""From what a grading box left behind to a verdict: pure functions over bytes and kernel evidence, so that they can be fuzzed.

No reward without full evidence: 1.0 needs every call of every run answered as expected, every run ended well, no anomaly on the channel and
no kernel limit crossed. What happened before agent code was loaded is the machinery's fault and raises; everything later is the agent's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strop.core.errors import GradingError
from strop.core.outcome import Flag
from strop.grading.protocol import Plan, Reading, read_answers
from strop.grading.rules import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxReport:
    """How a box ended.

    Attributes:
        stream: The result channel, as far as it was kept.
        is_stream_cut: The box wrote more than was kept.
        exit_code: ``None`` if it was killed.
        killed_by: ``""``, ``"timeout"``, ``"memory"`` or ``"processes"``, from kernel evidence only.
        stderr: For the message of a machinery failure.
        duration_s: Wall seconds.
    """

    stream: bytes
    is_stream_cut: bool = False
    exit_code: int | None = 0
    killed_by: str = ""
    stderr: str = ""
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The part of an outcome that depends on the changes alone, so that it can be shared by episodes that made the same changes.

    Attributes:
        reward: 1.0 or 0.0.
        parts: See ``judge``.
        reason: Why the reward is 0.
        flags: What the box's behaviour showed.
        is_order_dependent: The runs gave different answers to the same call.
        is_special_case: Every visible case passes and a hidden one fails.
        layers: Those of ``LAYERS`` that ran to their end.
    """

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    flags: tuple[Flag, ...] = ()
    is_order_dependent: bool = False
    is_special_case: bool = False
    layers: tuple[str, ...] = ()


LAYERS: Mapping[str, str] = {
    "isolated": "Only admitted source files, in a fresh box that the agent never touched.",
    "out_of_process": "Expected values and comparison outside the process that runs agent code; plain data between them.",
    "hidden_inputs": "Inputs that the agent never saw, with results of the unbroken original.",
    "shuffled": "All cases in a shuffled order with repeated inputs.",
    "fixed_order": "The visible cases in the order of the test file, in a fresh process.",
    "second_order": "Another order in a fresh process.",
    "single_call": "One call in a fresh process, held against its answer among others.",
}
"""What a verdict can rest on."""


def judge(plan: Plan, report: BoxReport) -> Verdict:
    """Decide.

    Args:
        plan: The calls that were asked for.
        report: How the box ended and what it wrote.

    Returns:
        A verdict whose parts are ``passed`` and ``total`` (cases, first run), ``visible_passed``, ``visible_total``, ``hidden_passed``,
        ``hidden_total``, ``tests`` (share passed), ``fixed_passed`` (visible cases passed in their fixed order) and ``runs_ok`` (runs
        that ended well).

    Raises:
        GradingError: No agent code was loaded; nothing can be said about the agent.
    """
    reading = read_answers(plan, report.stream)
    if not reading.stage:
        raise GradingError(
            f"the grading box ended before agent code was loaded (exit code {report.exit_code}, killed by {report.killed_by or '-'}): "
            f"{report.stderr.strip()[-300:] or 'no message'}",
            retryable=True,
        )
    passed = _passed_cases(plan, reading)
    parts = _parts(plan, reading, passed)
    order_dependent = _answers_differ(plan, reading)
    flags = []
    if reading.anomaly:
        flags.append(flag("report_forgery", f"result channel: {reading.anomaly}"))
    if report.killed_by in ("memory", "processes"):
        flags.append(flag("resource", f"the kernel stopped it for {report.killed_by}"))
    reason = _reason(plan, report, reading)
    if not reason:
        every_call = all(reading.answers[slot] == plan.expected[case] for slot, case in _calls(plan))
        reason = "" if every_call and len(passed) == len(plan.expected) else "unstable" if order_dependent else "tests"
    is_special = parts["visible_passed"] == plan.num_visible and parts["hidden_passed"] < parts["hidden_total"] and reading.stage == "done"
    return Verdict(
        reward=0.0 if reason else 1.0,
        parts=parts,
        reason=reason,
        flags=tuple(flags),
        is_order_dependent=order_dependent,
        is_special_case=is_special,
        layers=_layers(plan, reading),
    )


def _calls(plan: Plan) -> list[tuple[tuple[int, int], int]]:
    return [((run, position), case) for run, order in enumerate(plan.runs) for position, case in enumerate(order)]


def _passed_cases(plan: Plan, reading: Reading) -> set[int]:
    """Cases that the first run answered as expected every time it was asked."""
    asked: dict[int, list[bool]] = {}
    for position, case in enumerate(plan.runs[0]):
        asked.setdefault(case, []).append(reading.answers.get((0, position)) == plan.expected[case])
    return {case for case, results in asked.items() if all(results)}


def _parts(plan: Plan, reading: Reading, passed: set[int]) -> dict[str, float]:
    total, visible = len(plan.expected), plan.num_visible
    visible_passed = sum(case < visible for case in passed)
    return {
        "tests": len(passed) / total,
        "passed": len(passed),
        "total": total,
        "visible_passed": visible_passed,
        "visible_total": visible,
        "hidden_passed": len(passed) - visible_passed,
        "hidden_total": total - visible,
        "fixed_passed": sum(
            reading.answers.get((plan.fixed_run, position)) == plan.expected[case]
            for position, case in enumerate(plan.runs[plan.fixed_run] if plan.fixed_run >= 0 else ())
        ),
        "runs_ok": sum(ending == "ok" for ending in reading.endings.values()),
    }


def _layers(plan: Plan, reading: Reading) -> tuple[str, ...]:
    last = len(plan.runs) - 1
    done = {
        "isolated": True,
        "out_of_process": bool(reading.answers),
        "hidden_inputs": any(plan.runs[run][position] >= plan.num_visible for run, position in reading.answers),
        "shuffled": reading.endings.get(0) == "ok",
        "fixed_order": reading.endings.get(plan.fixed_run) == "ok",
        "second_order": last > 0 and reading.endings.get(last) == "ok",
        "single_call": last > 0 and (last, 0) in reading.answers,
    }
    return tuple(name for name in LAYERS if done[name])


def _answers_differ(plan: Plan, reading: Reading) -> bool:
    first: dict[int, bytes] = {}
    return any(
        first.setdefault(case, reading.answers[slot]) != reading.answers[slot] for slot, case in _calls(plan) if slot in reading.answers
    )


def _reason(plan: Plan, report: BoxReport, reading: Reading) -> str:
    """Why the reward is 0 whatever the answers say; empty if every call has an answer."""
    if report.killed_by in ("memory", "processes"):
        return "resource"
    if report.killed_by == "timeout" or "cpu" in (*reading.endings.values(), reading.error):
        return "hang"
    if reading.anomaly:
        return "forgery"
    if report.is_stream_cut:
        return "output"
    if reading.stage == "broken":
        return "exit" if reading.error == "SystemExit" else "crash"
    if reading.stage == "ready":
        return "exit" if report.exit_code == 0 else "crash"
    bad = [ending for ending in reading.endings.values() if ending != "ok"]
    if bad:
        return "exit" if bad[0].startswith("exit") else "crash"
    complete = (
        reading.stage == "done" and len(reading.endings) == len(plan.runs) and all(slot in reading.answers for slot, _ in _calls(plan))
    )
    return "" if complete else "exit"
