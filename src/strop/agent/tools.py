"""The agent's tools over one sandbox: list, search, read, edit, test, undo, submit.

``Toolbox.call`` never raises for anything the agent did: a wrong call is answered with a line that starts with ``error: ``. Only a
broken box raises (``SandboxError``). The same tools serve every model; nothing here knows a chat format.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from strop.agent.output import command_output
from strop.agent.toolspec import ToolError, check_arguments, tool_specs
from strop.agent.workspace import MAX_COUNTED, Hit, Replacement, TreeCache, Workspace, check_line, display, text_lines
from strop.core.errors import TaskError
from strop.core.task import Task
from strop.ports import Sandbox

LIST_LIMIT = 40
SEARCH_LIMIT = 8
NEAR_LIMIT = 3
READ_DEFAULT = 24
READ_ABOVE = 2
READ_LIMIT = 60
LINE_CHARS = 160
EDIT_LINES = 10
DEFAULT_TEST_ARGV = ("-m", "unittest", "discover", "-q", "-s", "tests")

Arguments = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Answer to a call.

    Attributes:
        observation: What the agent sees, truncated; ``""`` after ``submit``.
        status: ``"ok"``, ``"tool_error"``, or ``"malformed"`` where the action wasn't a call.
        sandbox_s: Wall seconds of commands in the box.
        ends: Whether the agent finished the episode.
    """

    observation: str
    status: str = "ok"
    sandbox_s: float = 0.0
    ends: bool = False


@dataclass(slots=True)
class Tally:
    """What happened so far in one episode.

    Attributes:
        edits: Edits made, undone ones included.
        tests: Test runs.
        is_green: Whether the last test run passed and nothing was edited since.
        first_edit: The first edit made: path and new content.
        first_edit_green: Whether the files passed as the first edit left them; ``None`` while nobody has run the tests on them.
        killed: Commands ended by the kernel, by cause.
    """

    edits: int = 0
    tests: int = 0
    is_green: bool = False
    first_edit: tuple[str, bytes] | None = None
    first_edit_green: bool | None = None
    killed: dict[str, int] = field(default_factory=dict)
    _is_first_edit_in_place: bool = False

    def edited(self, path: str, content: bytes) -> None:
        """Count an edit that left ``content`` in ``path``."""
        self.edits += 1
        self.is_green = False
        self._is_first_edit_in_place = self.first_edit is None
        if self.first_edit is None:
            self.first_edit = (path, content)

    def undone(self) -> None:
        """Note that an edit was taken back."""
        self.is_green = False
        self._is_first_edit_in_place = False

    def tested(self, is_green: bool, killed_by: str) -> None:
        """Count a test run and its result."""
        self.tests += 1
        self.is_green = is_green
        if killed_by:
            self.killed[killed_by] = self.killed.get(killed_by, 0) + 1
        if self._is_first_edit_in_place and self.first_edit_green is None:
            self.first_edit_green = is_green


class Toolbox:
    """The tools of one episode.

    Args:
        task: Names the tools allowed, the limits, and in ``provenance["test_argv"]`` (a JSON list of arguments of ``python``) how the
            visible tests are run; without it, everything under ``tests/`` is.
        sandbox: A fresh box over the task's workspace.
        base: Names the workspace in ``cache``.
        cache: Texts shared between episodes.

    Raises:
        TaskError: The task allows an unknown tool, or its test command can't be read.
    """

    def __init__(self, task: Task, sandbox: Sandbox, *, base: str, cache: TreeCache) -> None:
        tool_specs(task.tools)
        self.tally = Tally()
        self._task = task
        self._sandbox = sandbox
        self._workspace = Workspace(sandbox, base, cache)
        self._test_argv = _test_argv(task)
        self._undo: list[Replacement] = []
        self._tools: dict[str, Callable[[Arguments], ToolResult | Awaitable[ToolResult]]] = {
            "list": self._list,
            "search": self._search,
            "read": self._read,
            "edit": self._edit,
            "test": self._test,
            "undo": self._undo_last,
            "submit": self._submit,
        }

    async def call(self, name: str, arguments: Mapping[str, str]) -> ToolResult:
        """Run one call.

        Args:
            name: Tool name as the agent wrote it.
            arguments: By parameter name.

        Raises:
            SandboxError: The box broke.
        """
        try:
            checked = check_arguments(name, arguments, self._task.tools)
            result = self._tools[name](checked)
            return result if isinstance(result, ToolResult) else await result
        except ToolError as error:
            return ToolResult(f"error: {error}", "tool_error")

    def _list(self, arguments: Arguments) -> ToolResult:
        files = self._workspace.files
        lines = [f"[{index}] {display(path)}" for index, path in enumerate(files[:LIST_LIMIT], 1)]
        if len(files) > LIST_LIMIT:
            lines.append(f"\u2026 {len(files) - LIST_LIMIT} more, use search")
        return ToolResult("\n".join(lines) or "no files")

    def _search(self, arguments: Arguments) -> ToolResult:
        pattern = str(arguments["pattern"]).replace("\r\n", "\n")
        if not pattern:
            raise ToolError("PATTERN is empty")
        hits, more = self._workspace.search(pattern, SEARCH_LIMIT)
        lines = _shown(hits)
        if more:
            lines.append(f"\u2026 {more} more" if more <= MAX_COUNTED else f"\u2026 over {MAX_COUNTED} more")
        if not lines:
            near = self._workspace.definitions_like(pattern, NEAR_LIMIT)
            lines = [*_shown(near), "no match; these are definitions like it"] if near else ["no match"]
        return ToolResult("\n".join(lines))

    def _read(self, arguments: Arguments) -> ToolResult:
        path = self._workspace.resolve(str(arguments["file"]))
        lines = self._workspace.lines(path)
        start = check_line(path, lines, int(arguments["start"]))
        if "count" in arguments:
            count = min(int(arguments["count"]), READ_LIMIT)
        else:
            start, count = max(1, start - READ_ABOVE), READ_DEFAULT
        return ToolResult(_numbered(lines, start, count))

    def _edit(self, arguments: Arguments) -> ToolResult:
        path = self._workspace.resolve(str(arguments["file"]))
        old, new = str(arguments["old"]), str(arguments["new"])
        if not old:
            raise ToolError("OLD is empty; to insert text, replace a piece of the line by itself and the new text")
        if old == new:
            raise ToolError("OLD and NEW are the same; nothing was changed")
        done = self._workspace.replace(path, int(arguments["line"]), old, new)
        self._undo.append(done)
        self.tally.edited(path, done.after)
        return _changed(done.after, done.line, done.count_after)

    def _undo_last(self, arguments: Arguments) -> ToolResult:
        if not self._undo:
            raise ToolError("nothing to undo")
        done = self._undo[-1]
        self._workspace.restore(done.path, done.before)
        self._undo.pop()
        self.tally.undone()
        return _changed(done.before, done.line, done.count_before)

    async def _test(self, arguments: Arguments) -> ToolResult:
        limit = self._task.limits.exec_s
        result = await self._sandbox.run_python(self._test_argv, timeout_s=limit)
        self._workspace.command_ran()
        text = command_output(result.output) or f"no output, exit code {result.exit_code}"
        if result.killed_by:
            text += f"\n[killed: {_killed(result.killed_by, limit)}]"
        self.tally.tested(result.exit_code == 0 and not result.killed_by, result.killed_by)
        return ToolResult(text, sandbox_s=result.duration_s)

    def _submit(self, arguments: Arguments) -> ToolResult:
        return ToolResult("", ends=True)


def _changed(content: bytes, line: int, count: int) -> ToolResult:
    """Answer with the lines that an edit or an undo left in a file of ``content``."""
    shown = _numbered(text_lines(content), line, min(count, EDIT_LINES))
    return ToolResult(f"ok\n{shown}" if shown else "ok")


def _killed(cause: str, limit_s: float) -> str:
    reasons = {"timeout": f"ran longer than {limit_s:g} s", "memory": "used too much memory", "processes": "started too many processes"}
    return reasons.get(cause, cause)


def _test_argv(task: Task) -> list[str]:
    text = task.provenance.get("test_argv")
    if text is None:
        return list(DEFAULT_TEST_ARGV)
    try:
        argv = json.loads(text)
    except ValueError:
        argv = None
    if not isinstance(argv, list) or not argv or not all(isinstance(item, str) for item in argv):
        example = json.dumps(list(DEFAULT_TEST_ARGV))
        raise TaskError(f"provenance test_argv is {text!r}, expected a JSON list such as {example}", ids={"task": task.task_id})
    return argv


def _shown(hits: Sequence[Hit]) -> list[str]:
    return [f"[{hit.index}] {display(hit.path)}:{hit.line}:{_cut(hit.text)}" for hit in hits]


def _cut(line: str) -> str:
    shown = display(line)
    return shown if len(shown) <= LINE_CHARS else f"{shown[:LINE_CHARS]} [{len(shown) - LINE_CHARS} more characters]"


def _numbered(lines: list[str], start: int, count: int) -> str:
    """Return lines ``[start, start + count)`` as ``"214|    return x"``."""
    return "\n".join(f"{number}|{_cut(line)}" for number, line in enumerate(lines[start - 1 : start - 1 + count], start))
