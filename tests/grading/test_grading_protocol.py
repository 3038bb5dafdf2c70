"""Plan, request, reading and verdict: pure functions, fuzzed with every kind of stream that a box could leave."""

from __future__ import annotations

import json

import pytest
from grading_world import BUGGY, HIDDEN, VISIBLE, make_verifier, true_ordinal
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.errors import GradingError
from strop.grading.protocol import MAX_CHARS, Plan, expected_line, make_plan, read_answers
from strop.grading.verdict import LAYERS, BoxReport, Verdict, judge
from strop.tasks.verifier import Case, Verifier

VERIFIER = make_verifier()


def plan_of(*key: object, verifier: Verifier = VERIFIER) -> Plan:
    return make_plan(verifier, key=key or (0,), cpu_s=1.0, load_cpu_s=1.0)


def honest_stream(plan: Plan) -> list[bytes]:
    """What the driver writes for a function that is right."""
    lines = ["ready", "loaded"]
    for run, order in enumerate(plan.runs):
        lines += [f"{run}.{position} {plan.expected[case].decode()}" for position, case in enumerate(order)]
        lines.append(f"{run}.end ok")
    return [f"{plan.nonce} {line}\n".encode() for line in [*lines, "done"]]


def verdict_of(plan: Plan, lines: list[bytes], **facts: object) -> Verdict:
    return judge(plan, BoxReport(stream=b"".join(lines), **facts))  # type: ignore[arg-type]


def test_honest_stream_is_rewarded() -> None:
    plan = plan_of()
    verdict = verdict_of(plan, honest_stream(plan))
    assert (verdict.reward, verdict.reason, verdict.flags) == (1.0, "", ())
    assert verdict.parts == {
        "tests": 1.0,
        "passed": 26,
        "total": 26,
        "visible_passed": 8,
        "visible_total": 8,
        "hidden_passed": 18,
        "hidden_total": 18,
        "fixed_passed": 8,
        "runs_ok": 3,
    }
    assert verdict.layers == tuple(LAYERS)


def test_request_holds_inputs_only() -> None:
    text = plan_of().request.decode()
    assert not any(true_ordinal(n) in text for n in (*VISIBLE, *HIDDEN))
    assert "expected" not in text
    assert json.loads(text)["cases"] == [[[n], {}] for n in (*VISIBLE, *HIDDEN)]


def test_orders_depend_on_the_key_alone() -> None:
    assert plan_of(1, "t", "d").runs == plan_of(1, "t", "d").runs
    assert plan_of(1, "t", "d").nonce != plan_of(1, "t", "d").nonce
    assert len({plan_of(1, "t", digest).runs for digest in range(20)}) == 20


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_first_run_asks_everything_and_the_last_begins_with_its_last_case(seed: int) -> None:
    plan = plan_of(seed)
    first, fixed, second = plan.runs
    assert fixed == plan.runs[plan.fixed_run] == tuple(range(8))
    assert set(first) == set(range(26))
    assert len(first) == 28
    assert len(second) == 16
    only_once = [case for case in first if first.count(case) == 1]
    assert second[0] == only_once[-1] or second[0] in first[-3:] or second.count(second[0]) > 1


@pytest.mark.parametrize("index", range(240))
def test_every_single_damage_costs_the_reward(index: int) -> None:
    """Planted faults: a dropped, changed or repeated line anywhere but the greeting, and every kernel kill."""
    plan = plan_of()
    lines = honest_stream(plan)
    at = index % len(lines)
    damage = index // len(lines) % 4
    if damage == 0:
        lines.pop(at)
    elif damage == 1:
        lines[at] = lines[at].replace(b"th", b"st").replace(b"ok", b"cpu").replace(b"ready", b"steady").replace(b"done", b"gone")
        lines[at] = lines[at].replace(b"loaded", b"broken X") if lines[at] == honest_stream(plan)[at] else lines[at]
        lines[at] = lines[at].replace(b"nd", b"").replace(b"rd", b"") if lines[at] == honest_stream(plan)[at] else lines[at]
        lines[at] = lines[at].replace(b'st"', b'"') if lines[at] == honest_stream(plan)[at] else lines[at]
    elif damage == 2:
        lines.insert(at, lines[at])
    else:
        lines[at] = lines[at][len(plan.nonce) + 1 :]
    assert lines != honest_stream(plan)
    try:
        verdict = verdict_of(plan, lines)
    except GradingError:
        assert at == 0 or damage == 3  # the greeting is missing: nothing is known about the agent
        return
    assert verdict.reward == 0.0
    assert verdict.reason


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"killed_by": "memory"}, "resource"),
        ({"killed_by": "processes"}, "resource"),
        ({"killed_by": "timeout"}, "hang"),
        ({"is_stream_cut": True}, "output"),
    ],
)
def test_kernel_evidence_beats_right_answers(facts: dict[str, object], reason: str) -> None:
    plan = plan_of()
    assert (verdict_of(plan, honest_stream(plan), **facts).reward, verdict_of(plan, honest_stream(plan), **facts).reason) == (0.0, reason)


@pytest.mark.parametrize("killed_by", ["", "timeout", "memory", "processes"])
@pytest.mark.parametrize("stream", [b"", b"garbage\n", b"\xff\n" * 9])
def test_before_agent_code_everything_is_the_machinery(killed_by: str, stream: bytes) -> None:
    with pytest.raises(GradingError, match="before agent code"):
        judge(plan_of(), BoxReport(stream=stream, exit_code=None, killed_by=killed_by, stderr="no space"))


def test_order_dependence_and_special_cases_are_seen() -> None:
    plan = plan_of()
    lines = [line.replace(b'"113th"', b'"113rd"') if line.split()[1].startswith(b"1.") else line for line in honest_stream(plan)]
    while lines == honest_stream(plan):
        plan = plan_of(plan.nonce)
        lines = [line.replace(b'"113th"', b'"113rd"') if line.split()[1].startswith(b"1.") else line for line in honest_stream(plan)]
    verdict = verdict_of(plan, lines)
    assert (verdict.reward, verdict.reason, verdict.is_order_dependent) == (0.0, "unstable", True)
    assert "shuffled" in verdict.layers
    special = verdict_of(plan, [line.replace(b'"1013th"', b'"1013rd"') for line in honest_stream(plan)])
    assert (special.reward, special.reason, special.is_special_case, special.is_order_dependent) == (0.0, "tests", True, False)


_WORDS = st.sampled_from(
    ["ready", "loaded", "done", "broken X", "broken cpu", "0.end ok", "1.end ok", "0.end exit3", "1.end signal9", "0.0 v", "x", ""]
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(_WORDS, st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 26))), max_size=60),
    st.lists(st.binary(max_size=40), max_size=4),
    st.sampled_from(["", "timeout", "memory", "processes"]),
    st.booleans(),
)
def test_no_reward_above_the_evidence(words: list[object], junk: list[bytes], killed_by: str, has_nonce: bool) -> None:
    plan = plan_of()
    lines = []
    for word in words:
        if isinstance(word, tuple):
            run, position, case = word
            word = f"{run}.{position} {plan.expected[case % 26].decode()}"
        lines.append(f"{plan.nonce if has_nonce else 'no'} {word}\n".encode())
    stream = b"".join(lines) + b"".join(junk)
    try:
        verdict = judge(plan, BoxReport(stream=stream, exit_code=0, killed_by=killed_by))
    except GradingError:
        return
    reading = read_answers(plan, stream)
    complete = all((run, position) in reading.answers for run, order in enumerate(plan.runs) for position in range(len(order)))
    assert verdict.reward == 0.0 or (complete and reading.stage == "done" and not reading.anomaly and not killed_by)
    assert 0 <= verdict.parts["passed"] <= verdict.parts["total"] == 26


def test_types_count_in_expected_lines() -> None:
    lines = [expected_line(Case(args=(), expected=value)) for value in (1, 1.0, True, "1", [1], {"tuple": [1]}, None)]
    assert len(set(lines)) == len(lines)
    assert expected_line(Case(args=(), raises="ValueError")) == b"e ValueError"


def test_unusable_verifiers_are_errors() -> None:
    with pytest.raises(GradingError, match="no hidden cases"):
        plan_of(verifier=make_verifier(hidden=()))
    long = Verifier(module="m", qualname="f", path="m.py", visible=(), hidden=(Case(args=(), expected="x" * MAX_CHARS),))
    with pytest.raises(GradingError, match="case 0 expects"):
        plan_of(verifier=long)


def test_the_bug_is_one() -> None:
    namespace: dict[str, object] = {}
    exec(BUGGY, namespace)
    wrong = [n for n in (*VISIBLE, *HIDDEN) if namespace["ordinal"](n) != true_ordinal(n)]  # type: ignore[operator]
    assert {11, 12, 113} <= set(wrong)
