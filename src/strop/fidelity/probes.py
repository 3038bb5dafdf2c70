"""The probes: their names, what kind of difference each finds, and what to do about it. What a box answers is checked here.

A box is hostile: an answer counts only if it is a number or text of a known probe within its limits; anything else is the category
``unreadable`` of that probe, and nothing of it reaches a file name, a command or, unescaped, a terminal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from strop.fidelity.inside import PROBES as INSIDE

Value = float | str | tuple[str, ...]
"""An answer: a number, a text, or a set of texts in order."""

UNREADABLE = "unreadable"
MAX_TEXT = 160
MAX_ITEMS = 200
MAX_ANSWER = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One probe.

    Attributes:
        name: Its name in reports.
        kind: ``"static"``, ``"dynamic"`` or ``"transcript"``.
        equalise: How to make both kinds of box answer the same.
        randomise: Setting of ``sandbox.domain`` that draws it, or empty.
    """

    name: str
    kind: str
    equalise: str
    randomise: str = ""


_HOW = {
    "hostname": ("set the same host name", "hostname"),
    "hostname_file": ("set the same host name", "hostname"),
    "hosts_file": ("set the same host name", "hostname"),
    "path": ("check the repository out at the same path", "path"),
    "home": ("run as a user with the same home", ""),
    "user": ("run as the same user", ""),
    "variables": ("set the same variables: env.NAME=VALUE adds one", ""),
    "variable_values": ("set the same variables: env.NAME=VALUE adds one", ""),
    "search_path": ("set the same PATH", ""),
    "shell": ("set the same SHELL", ""),
    "container_files": ("use the same back end, or remove the file", ""),
    "cgroup": ("use the same back end: the control group's path shows", ""),
    "mounts": ("use the same back end, with the same mounts; a host name or path that is set shows here too", ""),
    "root": ("build both from the same image", ""),
    "uptime_s": ("start both at the same age", "uptime"),
    "boot_id": ("nothing: it differs with every machine; use several machines", ""),
    "clock_offset_s": ("synchronise the clocks", ""),
    "time_zone": ("set the same TZ", ""),
    "locale": ("set the same LANG", ""),
    "cpus": ("give both the same processors", ""),
    "memory_mb": ("use machines with the same memory", ""),
    "disk_mb": ("set the same sandbox.disk_mb", ""),
    "kernel": ("use machines with the same kernel", ""),
    "system": ("build both from the same image", ""),
    "python": ("install the same Python at the same place", ""),
    "packages": ("install the same packages: pip freeze on one side, pip install -r on the other", ""),
    "tools": ("install the same commands", ""),
    "git": ("keep, or remove, the same git data: remotes, depth, reflog", ""),
    "dot_files": ("put the same dot files into home and workspace", ""),
    "network": ("give both the same way out (egress)", ""),
    "dns": ("give both the same name servers", ""),
    "limits": ("set the same limits", ""),
    "processes": ("start the same processes", ""),
    "own_pid": ("use the same back end: process numbers start alike there", ""),
    "privileges": ("use the same back end and system call filter", ""),
    "load": ("run equally many boxes on a machine", ""),
    "temporary_files": ("leave the same in /tmp", ""),
    "devices": ("use the same back end, with the same devices", ""),
    "umask": ("set the same umask", ""),
    "terminal": ("attach, or don't attach, a terminal on both sides", ""),
}
_DYNAMIC = {
    "latency_exec_ms": ("use machines of the same speed", "latency_ms"),
    "latency_exec_p90_ms": ("use machines of the same speed", "latency_ms"),
    "latency_python_ms": ("use the same back end: a warm interpreter answers sooner", "latency_ms"),
    "latency_write_ms": ("use the same kind of disk", "latency_ms"),
    "error_text": ("use the same shell and commands", ""),
    "exit_codes": ("map exit codes alike", ""),
    "truncation": ("cut output by the same rule", ""),
    "output_order": ("merge stdout and stderr by the same rule", ""),
    "timeout": ("end commands that take too long in the same way", ""),
    "listing_order": ("use the same file system: directories list alike there", ""),
}
_TRANSCRIPT = {
    "transcript_tests": ("run tests by the same command and version", "runner"),
    "transcript_test_order": ("run tests in the same order", "order"),
    "transcript_commands": ("use the same versions of commands", ""),
    "transcript_traceback": ("use the same Python and path", "path"),
}

PROBES: Mapping[str, Probe] = {
    name: Probe(name=name, kind=kind, equalise=equalise, randomise=randomise)
    for kind, table in (("static", _HOW), ("dynamic", _DYNAMIC), ("transcript", _TRANSCRIPT))
    for name, (equalise, randomise) in table.items()
}
"""Every probe by name."""

assert set(_HOW) == set(INSIDE) - {"clock_s"} | {"clock_offset_s"}, "the two lists of static probes have drifted apart"


def read_answers(output: str, names: Iterable[str]) -> dict[str, Value]:
    """Read what ``inside`` printed.

    Args:
        output: All that the program printed, as the box gives it.
        names: The probes that were asked for.

    Returns:
        A value for every name; ``UNREADABLE`` where there is none that can be trusted to be one.
    """
    answers: Any = None
    length, _, rest = output.partition("\n")
    if length.isascii() and length.isdigit() and len(length) <= 6 and len(output) <= 2 * MAX_ANSWER:
        text = rest.removesuffix("\n")
        try:
            answers = json.loads(text) if len(text) == int(length) else None
        except (ValueError, RecursionError):
            answers = None
    if not isinstance(answers, dict):
        answers = {}
    return {name: checked(answers.get(name)) for name in names}


def checked(value: object) -> Value:
    """Return a value that is surely a finite number, a short printable text, or a tuple of those texts; else ``UNREADABLE``."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, bool) or value is None:
        return UNREADABLE
    if isinstance(value, (int, float)):
        try:
            number = float(value)
        except OverflowError:
            return UNREADABLE
        return number if math.isfinite(number) else UNREADABLE
    if isinstance(value, (list, tuple)) and len(value) <= MAX_ITEMS and all(isinstance(item, str) for item in value):
        return tuple(printable(item) for item in value)
    return UNREADABLE


def printable(text: str) -> str:
    """Return ``text`` cut to ``MAX_TEXT`` characters, with everything that a terminal or page could act on escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text[:MAX_TEXT])[: 2 * MAX_TEXT]
