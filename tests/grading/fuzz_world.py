"""Random trees, diffs and result streams, and what must hold of each; used by a test and, in large numbers, by a benchmark."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path

from grading_world import BUGGY, TESTS, VISIBLE, WORDS, World, make_episode, make_turn, make_verifier, true_ordinal

from strop.core.errors import GradingError
from strop.core.outcome import Scored
from strop.grading.admission import MAX_FLAGS, AdmissionLimits, admit, changed_sources
from strop.grading.auditor import audit_material
from strop.grading.contrast import traits
from strop.grading.protocol import Plan, make_plan
from strop.grading.repair import write_layer
from strop.grading.rules import MAX_EVIDENCE, TextChange, added_state, copy_flags, text_flags, turn_flags
from strop.grading.special import special_case_evidence
from strop.grading.table import RULES
from strop.grading.verdict import LAYERS, BoxReport, judge

# fmt: off
NAMES = (
    "textkit", "words.py", "lines.py", "__init__.py", "tests", "test_words.py", "test_more.py", "conftest.py", "setup.cfg", "pytest.ini",
    "x.pth", "sitecustomize.py", ".git", "config", "HEAD", "__pycache__", "words.cpython-311.pyc", "reward.json", "junit.xml", "a.so",
    ".answers", "json", "unittest", "..", ".", "~", "-rf", "\u202e.py", "\udcff.py", "\n.py", "\u00e9.py", "CON", "entry_points.txt",
    "a.dist-info", "words.py/", "\\x", "/etc", "",
)
# fmt: on
CONTENTS = (b"", b"x = 1\n", WORDS.encode(), BUGGY.encode(), TESTS.encode(), b"\0\xff\xfe" * 40, b"#" * 4000, "é".encode("latin-1"), None)
# fmt: off
FRAGMENTS = (
    "import os\n", "os._exit(0)\n", "'", '"""', "#", "\\", "\n", "global x\n", "def f(a, b=[]):\n", "    return ", "sys._getframe",
    "f'{x", "}'", "PASSED", "reward.json", "lambda: True", "__eq__", "(((((", ")))", "0x", "1e999", "\u2028", "\ufffd", "if x:\n", "\t",
    "class A(str):\n", "reviewer: score 10",
    *(repr(true_ordinal(n)) for n in VISIBLE),
)
# fmt: on
RULE_NAMES = {rule.name for rule in RULES}
LIMITS = AdmissionLimits(max_files=6, max_file_bytes=3000, max_total_bytes=5000)


class Fuzz:
    """One source of random inputs.

    Args:
        seed: Fixes everything.
        directory: An empty directory.
    """

    def __init__(self, seed: int, directory: Path) -> None:
        self.random = random.Random(seed)
        self.directory = directory
        self.world = World(directory / "base")
        self.verifier = make_verifier()
        self.rewarded = 0
        self.written = 0

    # ------------------------------------------------------------------------------------------------ trees

    def tree(self) -> None:
        """A random set of changes: everything is kept or named, what is kept can be written and stays inside."""
        pick = self.random
        changes = {self._path(): pick.choice(CONTENTS) for _ in range(pick.randrange(9))}
        base = str(self.world.directory)
        found = admit(base, changes, pick.choice(("textkit/words.py", "textkit/words.py", "words.py")), LIMITS)
        assert set(found.changes) <= set(changes)
        assert len(found.flags) <= MAX_FLAGS
        _check_flags(found.flags)
        for path, content in found.changes.items():
            assert content == changes[path]
            assert not path.startswith("/")
            assert ".." not in path.split("/")
            assert os.path.realpath(os.path.join(base, path)).startswith(os.path.realpath(base))
        sizes = [len(content) for content in found.changes.values() if content is not None]
        is_over = (
            len(found.changes) > LIMITS.max_files or sum(sizes) > LIMITS.max_total_bytes or max(sizes, default=0) > LIMITS.max_file_bytes
        )
        assert found.is_oversize == is_over
        differing = [path for path, content in changes.items() if content != _base(base, path)]
        if differing and not found.changes:
            assert found.flags, f"{differing} vanished without a word"
        changed_sources(base, changes)
        if pick.random() < 0.02 and not found.is_oversize:
            self._write(found.changes)

    def _path(self) -> str:
        parts = [self.random.choice(NAMES) for _ in range(self.random.choice((1, 2, 2, 2, 3, 4)))]
        path = "/".join(parts)
        return path if self.random.random() < 0.95 else path[: self.random.randrange(len(path) + 1)] + chr(self.random.randrange(1, 0x300))

    def _write(self, changes: dict | object) -> None:
        place = Path(tempfile.mkdtemp(dir=self.directory))
        layer = write_layer(place, changes)  # type: ignore[arg-type]
        held = {str(path.relative_to(layer)) for path in layer.rglob("*") if not path.is_dir()}
        assert held == set(changes)  # type: ignore[arg-type]
        shutil.rmtree(place)
        self.written += 1

    # ------------------------------------------------------------------------------------------------ diffs

    def diff(self) -> None:
        """A random change of a file: every rule reads it, and what it says is short, printable and from the table."""
        old = self.random.choice(("", BUGGY, WORDS, self._text(6)))
        new = self._text(12) if self.random.random() < 0.3 else self._mutated(old)
        change = TextChange("textkit/words.py", old, new)
        _check_flags(text_flags([change]))
        _check_flags(copy_flags(change, is_standard_library=self.random.random() < 0.5))
        turn = make_turn(self.random.choice(("read", "edit", "", "search")), text=self._text(3), file=self._text(2), new=self._text(2))
        _check_flags(turn_flags([turn]))
        added_state(change)
        special_case_evidence(self.verifier, [change])
        traits([change], ["textkit/words.py"], Scored(reward=0.0))
        audit_material([change], make_episode({"textkit/words.py": new.encode("utf-8", "surrogateescape")}).changes, [turn])
        same = TextChange(change.path, new, new)
        assert text_flags([same]) == copy_flags(same, is_standard_library=True) == [], "what was there already fires nothing"

    def _text(self, pieces: int) -> str:
        return "".join(self.random.choice(FRAGMENTS) for _ in range(self.random.randrange(pieces + 1)))

    def _mutated(self, text: str) -> str:
        for _ in range(self.random.randrange(1, 4)):
            at = self.random.randrange(len(text) + 1)
            text = text[:at] + self.random.choice(FRAGMENTS) + text[at + self.random.randrange(3) :]
        return text

    # ------------------------------------------------------------------------------------------------ streams

    def stream(self) -> None:
        """A random result stream: a reward if and only if a second, simpler reading finds everything that a reward needs."""
        pick = self.random
        plan = make_plan(self.verifier, key=(pick.random(),), cpu_s=1.0, load_cpu_s=1.0)
        lines = honest_lines(plan)
        for _ in range(pick.choice((0, 1, 1, 1, 2, 3, 5))):
            self._damage(plan, lines)
        stream = b"".join(lines)
        if pick.random() < 0.2:
            stream = stream[: pick.randrange(len(stream) + 1)]
        if pick.random() < 0.05:
            stream = bytes(pick.randrange(256) for _ in range(pick.randrange(200)))
        killed_by = pick.choice(("", "", "", "", "timeout", "memory", "processes"))
        is_cut = pick.random() < 0.05
        report = BoxReport(stream=stream, is_stream_cut=is_cut, exit_code=pick.choice((0, 0, 0, 1, None)), killed_by=killed_by)
        try:
            verdict = judge(plan, report)
        except GradingError:
            assert not stream.startswith(f"{plan.nonce} ready\n".encode()), "agent code was loaded: the machinery can't be to blame"
            return
        is_earned = not killed_by and not is_cut and holds_everything(plan, stream)
        assert (verdict.reward == 1.0) == is_earned, (verdict, stream)
        assert verdict.reward in (0.0, 1.0)
        assert bool(verdict.reason) == (verdict.reward == 0.0)
        assert set(verdict.layers) <= set(LAYERS)
        assert 0 <= verdict.parts["passed"] <= verdict.parts["total"]
        assert verdict.reward == 0.0 or set(verdict.layers) == set(LAYERS)
        _check_flags(verdict.flags)
        self.rewarded += verdict.reward == 1.0

    def _damage(self, plan: Plan, lines: list[bytes]) -> None:
        pick = self.random
        at = pick.randrange(len(lines)) if lines else 0
        kind = pick.randrange(8)
        if kind == 0 or not lines:
            lines.insert(
                at, pick.choice((b"\n", b"PASSED\n", f"{plan.nonce} done\n".encode(), f"{plan.nonce} 0.0 v 1\n".encode(), b"\xff\xfe"))
            )
        elif kind == 1:
            lines.pop(at)
        elif kind == 2:
            lines.insert(at, lines[at])
        elif kind == 3:
            other = pick.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        elif kind == 4:
            lines[at] = lines[at].replace(plan.nonce.encode(), b"0" * 24)
        elif kind == 5:
            where = pick.randrange(len(lines[at]))
            lines[at] = lines[at][:where] + bytes([pick.randrange(256)]) + lines[at][where + 1 :]
        elif kind == 6:
            lines[at] = lines[at].replace(b" ok", pick.choice((b" cpu", b" exit0", b" signal9", b" ok ")))
        else:
            head, _, _ = lines[at].rpartition(b" v ")
            lines[at] = head + b" v " + pick.choice(plan.expected)[2:] + b"\n" if head else lines[at]


def honest_lines(plan: Plan) -> list[bytes]:
    """What the driver writes for a function that is right."""
    lines = ["ready", "loaded"]
    for run, order in enumerate(plan.runs):
        lines += [f"{run}.{position} {plan.expected[case].decode()}" for position, case in enumerate(order)]
        lines.append(f"{run}.end ok")
    return [f"{plan.nonce} {line}\n".encode() for line in [*lines, "done"]]


def holds_everything(plan: Plan, stream: bytes) -> bool:
    """Whether a stream is the honest one, answers of a run in any order before its end and nothing else anywhere."""
    if not stream.endswith(b"\n"):
        stream = stream[: stream.rfind(b"\n") + 1]
    lines = [line + b"\n" for line in stream.split(b"\n")[:-1]]
    honest = honest_lines(plan)
    if sorted(lines) != sorted(honest) or lines[:2] != honest[:2] or lines[-1:] != honest[-1:]:
        return False
    seen_end = set()
    for line in lines[2:-1]:
        run = int(line.split(b" ")[1].split(b".")[0])
        if run in seen_end:
            return False
        if line.split(b" ")[1].endswith(b".end"):
            seen_end.add(run)
    return True


def _check_flags(flags: object) -> None:
    for item in flags:  # type: ignore[attr-defined]
        assert item.rule in RULE_NAMES, item
        assert len(item.evidence) <= MAX_EVIDENCE, item
        assert item.evidence.isprintable() or not item.evidence, item


def _base(base: str, path: str) -> bytes | None:
    try:
        full = os.path.join(base, path)
        return Path(full).read_bytes() if os.path.isfile(full) else None
    except (OSError, ValueError):
        return None
