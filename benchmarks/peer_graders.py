"""Graders as they are in use, each in a few lines: what they read is what the agent's own box left behind after the hidden tests ran in it.

All of them run the hidden tests in the agent's box over the agent's files, with the test file restored first, which is the common way.
Sources: SWE-bench 7a21e05 (``parse_log_pytest``, report rules and, from version 5, the exit code beside the log), SWE-smith cf2e649
(a test that the log doesn't name counts as passed), Harbor 0.26 and others (exit code, JUnit XML).
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

MAX_XML = 1 << 20
STATUSES = ("FAILED", "PASSED", "SKIPPED", "ERROR", "XFAIL")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What a run of the hidden tests in the agent's box leaves.

    Attributes:
        exit_code: Of the test runner, ``None`` if it was killed.
        log: Its output.
        junit: The XML report in the workspace, empty if there is none.
        wanted: Names of the tests that must pass, as the log spells them.
    """

    exit_code: int | None
    log: str
    junit: bytes
    wanted: Sequence[str]


def parse_log(log: str) -> dict[str, str]:
    """Status by test name, from lines such as ``PASSED tests/test_a.py::test_b``; a later line wins."""
    found: dict[str, str] = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", log).split("\n"):
        if line.startswith(STATUSES):
            words = line.replace(" - ", " ").split() if line.startswith("FAILED") else line.split()
            if len(words) > 1:
                found[words[1]] = words[0]
    return found


def by_exit_code(evidence: Evidence) -> bool:
    """The runner says 0."""
    return evidence.exit_code == 0


def by_log(evidence: Evidence) -> bool:
    """Every wanted test stands in the log as passed."""
    found = parse_log(evidence.log)
    return all(found.get(name) in ("PASSED", "XFAIL") for name in evidence.wanted)


def by_log_missing_passes(evidence: Evidence) -> bool:
    """No wanted test stands in the log as failed."""
    found = parse_log(evidence.log)
    return all(found.get(name, "PASSED") in ("PASSED", "XFAIL") for name in evidence.wanted)


def by_log_and_exit_code(evidence: Evidence) -> bool:
    """Both: the rule of SWE-bench 5."""
    return by_log(evidence) and by_exit_code(evidence)


def by_junit(evidence: Evidence) -> bool:
    """The XML report has test cases, at least as many as wanted, and none that failed or was skipped."""
    if not evidence.junit or len(evidence.junit) > MAX_XML or b"<!DOCTYPE" in evidence.junit:
        return False
    try:
        root = ElementTree.fromstring(evidence.junit)
    except ElementTree.ParseError:
        return False
    suites = [root] if root.tag == "testsuite" else list(root.iter("testsuite"))

    def count(name: str) -> int:
        return sum(int(suite.get(name, "0")) for suite in suites if suite.get(name, "0").isdecimal())

    return count("tests") >= len(evidence.wanted) and not count("failures") + count("errors") + count("skipped")


GRADERS: Mapping[str, Callable[[Evidence], bool]] = {
    "exit code": by_exit_code,
    "log": by_log,
    "log, missing passes": by_log_missing_passes,
    "log and exit code (SWE-bench 5)": by_log_and_exit_code,
    "JUnit XML": by_junit,
}
