"""A box may answer anything: what is read is a number or short printable text, or ``unreadable``."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from fidelity_kit import ScriptedProvider, honest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.fidelity import inside
from strop.fidelity.collect import collect, disorder, make_tasks, ngrams, observe
from strop.fidelity.probes import PROBES, UNREADABLE, Value, checked, printable, read_answers
from strop.fidelity.twosample import two_sample

NAMES = ("hostname", "uptime_s", "tools")


def is_harmless(value: Value) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    texts = value if isinstance(value, tuple) else (value,)
    return len(texts) <= 200 and all(isinstance(text, str) and text.isprintable() and len(text) <= 320 for text in texts)


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=300))
def test_any_output_is_read_without_an_error(output: str):
    found = read_answers(output, NAMES)
    assert tuple(found) == NAMES
    assert all(is_harmless(value) for value in found.values())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from((*NAMES, "other")), JSON, max_size=4))
def test_any_json_is_read_without_an_error(answers: dict):
    text = json.dumps(answers)
    found = read_answers(f"{len(text)}\n{text}\n", NAMES)
    assert tuple(found) == NAMES
    assert all(is_harmless(value) for value in found.values())


@pytest.mark.parametrize(
    "output",
    [
        "",
        "5",
        "999999999999999\n{}",
        "100000\n" + "[" * 100_000,
        "2\n{}x",
        "4\nnull\n",
        "²\n{}\n",
        '16\n{"uptime_s":1e999}\n',
        "[... 3 elided ...]",
    ],
)
def test_hostile_output_is_unreadable(output: str):
    assert set(read_answers(output, NAMES).values()) == {UNREADABLE}


def test_what_a_terminal_could_act_on_is_escaped():
    assert printable("a\x1b[2Jb\n\u202e\ud800") == "a\\x1b[2Jb\\n\\u202e\\ud800"
    assert checked(10**400) == UNREADABLE
    assert checked(["x"] * 201) == UNREADABLE
    assert checked(True) == UNREADABLE


def test_the_program_answers_every_probe_and_stays_small():
    done = subprocess.run([sys.executable, inside.__file__, *inside.PROBES], capture_output=True, text=True, check=True)
    names = list(inside.PROBES)
    length, text = done.stdout.splitlines()
    assert int(length) == len(text)
    assert set(json.loads(text)) == set(names)


def test_every_probe_says_what_to_do():
    assert all(probe.equalise and probe.kind in ("static", "dynamic", "transcript") for probe in PROBES.values())


def test_ngrams_hold_nothing_of_the_task():
    found = ngrams("3 failed in ledger.py, 12 passed in ledger", frozenset({"ledger"}))
    assert isinstance(found, tuple)
    assert {"failed", "0 failed", "passed in"} <= set(found)
    assert not any("ledger" in item for item in found)


def test_disorder_counts_pairs():
    assert disorder(["a", "b", "c"]) == 0.0
    assert disorder(["c", "b", "a"]) == 1.0
    assert disorder(["a"]) == "none"


def test_boxes_are_asked_in_pairs_and_stopped(tmp_path: Path):
    train, production = ScriptedProvider(honest("box")), ScriptedProvider(honest("web-7"))
    rows = asyncio.run(collect(train, production, make_tasks(tmp_path, 3), 9))  # type: ignore[arg-type]
    assert len(rows) == 18
    assert all({row.is_production for row in rows[at : at + 2]} == {False, True} for at in range(0, 18, 2))
    assert all(box.stopped for box in (*train.boxes, *production.boxes))
    assert all(set(row.values) == set(PROBES) for row in rows)
    found = two_sample(rows, permutations=40)
    assert (found.probes[0].name, found.auc) == ("hostname", 1.0)


def test_a_box_that_prints_rubbish_is_an_observation(tmp_path: Path):
    provider = ScriptedProvider("\x1b[2J" * 2000)
    row = asyncio.run(observe(provider, make_tasks(tmp_path, 1)[0], is_production=True))  # type: ignore[arg-type]
    assert row.values["hostname"] == UNREADABLE
    assert all(is_harmless(value) for value in row.values.values())


def test_tasks_share_no_name(tmp_path: Path):
    tasks = make_tasks(tmp_path, 14)
    assert len({task.name for task in tasks}) == 14
    assert not {task.name for task in tasks} & sys.stdlib_module_names
    assert all(Path(task.base, task.name, "core.py").is_file() for task in tasks)
