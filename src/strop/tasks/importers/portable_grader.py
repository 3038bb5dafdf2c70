"""Reads a test log and writes a reward, without anything but the standard library: a copy of this file goes into exported Harbor tasks.

    python3 grade.py PLAN LOG EXIT_CODE REWARD

PLAN is JSON: ``{"parser", "eval_type", "fail_to_pass", "pass_to_pass", "expected"}``. The rules are those of SWE-bench 5: a missing test
failed (with ``eval_type`` ``"fail_only"`` it passed), a skipped one resolves nothing but breaks nothing, and a log without any failure next
to an exit code that isn't 0 is not believed. With ``expected`` the statuses must be exactly those. Nothing is written where no verdict is
possible, which Harbor counts as a failure of the machinery and not as a reward of 0.

A log can be forged by the code under test; strop's own grader doesn't read logs. This one exists so that exported tasks work elsewhere.
"""

from __future__ import annotations

import json
import re
import sys

STATUSES = ("PASSED", "FAILED", "SKIPPED", "ERROR", "XFAIL", "XPASS")
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
PYTEST_PARSERS = (
    "pytest",
    "parse_log_pytest",
    "parse_log_pytest_options",
    "parse_log_pytest_v2",
    "parse_log_flask",
    "parse_log_marshmallow",
    "parse_log_pvlib",
    "parse_log_pyvista",
    "parse_log_sqlfluff",
    "parse_log_xarray",
    "parse_log_pydicom",
    "parse_log_requests",
    "parse_log_pylint",
    "parse_log_astroid",
    "parse_log_astropy",
    "parse_log_scikit",
    "parse_log_sphinx",
)
"""Names of log parsers whose logs are those of pytest with ``-rA``."""

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f]")


def parse_pytest(log: str) -> dict[str, str]:
    """Return test name to status, from the short summary (``-rA``) and from verbose lines."""
    found: dict[str, str] = {}
    for raw in log.split("\n"):
        line = _ESCAPES.sub("", raw).strip()
        first, _, rest = line.partition(" ")
        if first in STATUSES and rest:
            name = rest.split(" - ", 1)[0].strip()
            if not (first == "SKIPPED" and re.match(r"\[\d+\]", name)):
                found[name] = first
            continue
        if match := re.fullmatch(r"(\S*::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)(?: +\[ *\d+%\])?(?: .*)?", line):
            found.setdefault(match[1], match[2])
    return found


def status_of(name: str, statuses: dict[str, str]) -> str | None:
    """Return the status of a test, ``None`` for a missing one.

    Some published names are cut off within their parameters: a name with more ``[`` than ``]`` stands for those that begin with it, if all
    of them agree.
    """
    if name in statuses:
        return statuses[name]
    if name.count("[") > name.count("]"):
        close = {statuses[key] in ("PASSED", "XFAIL"): statuses[key] for key in statuses if key.startswith(name)}
        if len(close) == 1:
            return next(iter(close.values()))
    return None


def grade(plan: dict, log: str, exit_code: int) -> tuple[float | None, str]:
    """Return the reward and why; ``None`` where no verdict is possible."""
    if plan["parser"] not in PYTEST_PARSERS:
        return None, f"no parser for logs of {plan['parser']!r}"
    if START in log and END in log:
        log = log.split(START, 1)[1].split(END, 1)[0] or log
    statuses = parse_pytest(log)
    if not statuses:
        return None, "the log holds no result of any test"
    if exit_code not in (0, -1) and not any(status in ("FAILED", "ERROR") for status in statuses.values()):
        return None, f"exit code {exit_code}, but no failure in the log"
    if plan.get("expected"):
        expected = plan["expected"]
        got = {_short(name): status for name, status in statuses.items()}
        return (
            (1.0, "as expected")
            if got == {_short(name): status for name, status in expected.items()}
            else (0.0, "other results than expected")
        )
    absent_passes = plan.get("eval_type") == "fail_only"
    for name in plan["fail_to_pass"]:
        status = status_of(name, statuses)
        if status not in ("PASSED", "XFAIL") and not (status is None and absent_passes):
            return 0.0, f"{name}: {status or 'missing'}"
    for name in plan["pass_to_pass"]:
        status = status_of(name, statuses)
        if status not in ("PASSED", "XFAIL", "SKIPPED") and not (status is None and absent_passes):
            return 0.0, f"{name}: {status or 'missing'}"
    return 1.0, "resolved"


def _short(name: str) -> str:
    """R2E-Gym names tests by class and function: ``"tests/a.py::TestX::test_y"`` -> ``"TestX.test_y"``."""
    return ".".join(name.split(" - ")[0].split("::")[1:]) if "::" in name else name


def main(argv: list[str]) -> int:
    """Write the reward; returns the exit code."""
    plan_path, log_path, exit_code, reward_path = argv
    with open(plan_path, encoding="utf-8") as file:
        plan = json.load(file)
    with open(log_path, encoding="utf-8", errors="replace") as file:
        log = file.read()
    reward, why = grade(plan, log, int(exit_code))
    print(why)
    if reward is None:
        return 1
    with open(reward_path, "w", encoding="utf-8") as file:
        json.dump({"reward": reward}, file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
