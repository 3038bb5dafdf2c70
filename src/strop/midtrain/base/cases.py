"""Windows of real code with bugs in one function, for documents of the base; names and line numbers are replaced at random."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from strop.core.errors import TaskError
from strop.midtrain.base.corpus import Module
from strop.midtrain.base.names import NameMaker
from strop.tasks.mutation import IDENTIFIER_KINDS, Edit, FunctionSpan, apply_edit, candidate_edits, inverse

IDENTIFIER_SHARE = 0.2
TIGHT_SHARE = 0.6
TIGHT_LINES = 8
"""Share of short windows that show nothing but a function of few lines: attention finds its target there first."""
ENOUGH_EDITS = 12
"""Functions in which the catalogue offers fewer edits get rarer bugs: in a task's function it offers at least 10."""
WINDOW_LINES = 24
WINDOW_ABOVE = 2
NAME = re.compile(r"\b[a-zA-Z_][a-zA-Z0-9_]{2,}\b")
_LOCAL = re.compile(r"\b([a-z_][a-z0-9_]{2,})\b(?= = |,|\))")
_KEEP = frozenset(["self", "cls", "None", "True", "False", "return", "yield", "else", "and", "not", "for", "the"])


@dataclass(frozen=True, slots=True)
class Window:
    """Code around one function, as ``read`` shows it.

    Attributes:
        lines: Lines of the window, names already replaced.
        first: Number of the first line.
        name: Function name.
        span: The function inside ``lines`` (1-based).
    """

    lines: tuple[str, ...]
    first: int
    name: str
    span: FunctionSpan

    def numbered(self, lines: list[str] | None = None) -> str:
        """The window as an observation."""
        return "\n".join(f"{n}|{line}" for n, line in enumerate(lines or self.lines, self.first))


class CaseMaker:
    """Makes windows and bugs.

    Args:
        modules: Where the code comes from.
        names: Where new names come from.
    """

    def __init__(self, modules: list[Module], names: NameMaker) -> None:
        self._names = names
        self._functions = [(m, f) for m in modules for f in m.functions]

    def window(self, rng: np.random.Generator, *, short: bool = False) -> Window:
        """Return a window around a random function; ``short`` ones end soon after it, and often show nothing else."""
        tight = short and rng.random() < TIGHT_SHARE
        while True:
            module, function = self._functions[int(rng.integers(0, len(self._functions)))]
            length = function.end_line - function.start_line + 1
            if length <= (TIGHT_LINES if tight else WINDOW_LINES - WINDOW_ABOVE) and (tight or length >= 6 or rng.random() < 0.3):
                break
        lines = module.text.split("\n")
        start = function.start_line if tight else max(1, function.start_line - WINDOW_ABOVE)
        stop = start - 1 + WINDOW_LINES
        if tight:
            stop = function.end_line
        elif short:
            stop = min(stop, function.end_line + int(rng.integers(0, 4)))
        window = lines[start - 1 : stop]
        span = FunctionSpan(function.name, function.start_line - start + 1, function.end_line - start + 1)
        body = "\n".join(window)
        name = function.name.split(".")[-1]
        renames = {name: self._names.make(rng)} if not name.startswith("__") and rng.random() < 0.85 else {}
        if rng.random() < 0.5:
            own = sorted({w for line in window[span.start_line - 1 : span.end_line] for w in _LOCAL.findall(line)})
            for word in own:
                if word not in renames and word not in _KEEP and rng.random() < 0.4:
                    renames[word] = self._names.make(rng)
        if renames:
            body = NAME.sub(lambda m: renames.get(m.group(), m.group()), body)
        first = start if rng.random() < 0.3 else int(rng.integers(1, 999 if rng.random() < 0.9 else 2500))
        return Window(tuple(body.split("\n")), first, renames.get(name, name), span)

    def case(self, rng: np.random.Generator, count: int, *, short: bool = False) -> tuple[Window, list[str], list[Edit]]:
        """Return a window, its lines with up to ``count`` bugs in the function, and the repairs."""
        while True:
            window = self.window(rng, short=short)
            text = "\n".join(window.lines)
            try:
                candidates = candidate_edits(text, window.span)
                if rng.random() * ENOUGH_EDITS > len(candidates):
                    continue
                chosen = choose_edits(rng, candidates, count)
                if not chosen:
                    continue
                repairs = [inverse(text, edit) for edit in chosen]
                for edit in chosen:
                    text = apply_edit(text, edit)
            except TaskError:  # a random name made the text unparseable, or the window cut it
                continue
            if text.count("\n") == len(window.lines) - 1:
                return window, text.split("\n"), repairs


def choose_edits(rng: np.random.Generator, candidates: list[Edit], count: int) -> list[Edit]:
    """Choose up to ``count`` edits on different lines: first a kind (identifier kinds in a fifth of the draws), then a place."""
    chosen: list[Edit] = []
    for _ in range(count):
        free = [e for e in candidates if all(e.line != c.line for c in chosen)]
        plain = [e for e in free if e.kind not in IDENTIFIER_KINDS]
        if plain and (rng.random() > IDENTIFIER_SHARE or len(plain) == len(free)):
            free = plain
        elif len(plain) < len(free):
            free = [e for e in free if e.kind in IDENTIFIER_KINDS]
        if not free:
            break
        kinds = sorted({e.kind for e in free})
        kind = kinds[int(rng.integers(0, len(kinds)))]
        same = [e for e in free if e.kind == kind]
        chosen.append(same[int(rng.integers(0, len(same)))])
    return chosen
