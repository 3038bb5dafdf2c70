"""What an agent is shown of a command's output: the ordinary text, made repeatable and cut by rule.

A run can be replayed token for token only if the same program prints the same text twice. Two things in ordinary test output never
repeat, and nothing can be learned from them: elapsed times and memory addresses. They are replaced; every other character stays as
the tool printed it. (The order of sets and dictionaries repeats because the sandbox fixes the hash seed.)
"""

from __future__ import annotations

import re

HEAD_CHARS = 540
TAIL_CHARS = 60

_ELAPSED = re.compile(r"^(Ran \d+ tests?) in \d+\.\d+s$", re.MULTILINE)
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{4,16}\b")


def stable_output(text: str) -> str:
    """Return ``text`` without what differs between two identical runs.

    Example: ``"Ran 8 tests in 0.003s"`` becomes ``"Ran 8 tests"``, ``"<object object at 0x7f21c04>"`` becomes
    ``"<object object at 0x...>"``.
    """
    return _ADDRESS.sub("at 0x...", _ELAPSED.sub(r"\1", text))


def truncate(text: str, *, head: int = HEAD_CHARS, tail: int = TAIL_CHARS) -> str:
    """Return the first ``head`` and last ``tail`` characters with the number of characters left out between them.

    Text that would not get shorter is returned unchanged. Example: ``truncate("a" * 50 + "b" * 50, head=3, tail=2)`` is
    ``"aaa\\n[95 characters left out]\\nbb"``.
    """
    left_out = len(text) - head - tail
    note = f"\n[{left_out} characters left out]\n"
    if left_out <= len(note):
        return text
    return text[:head] + note + text[len(text) - tail :]


def command_output(text: str, *, head: int = HEAD_CHARS, tail: int = TAIL_CHARS) -> str:
    """Return what the agent sees of a command's output: stable, without carriage returns and outer blank lines, truncated."""
    return truncate(stable_output(text.replace("\r\n", "\n")).strip("\n"), head=head, tail=tail)
