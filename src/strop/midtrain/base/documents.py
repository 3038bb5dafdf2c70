"""Pre-training documents, made on the fly from a corpus: the same seed and index give the same document.

Kinds of documents:
    repair   a window of real code with one to six bugs in one function, then the edits that repair them, as tool calls
    episode  a whole imitation episode (failing test output, search, read, edits, tests, submit) around such a window; nothing is run
    navigate the beginning of such an episode, up to the call that reads the function
    copy     listings and searches over made-up trees, then the calls that must copy a name, an index or a line number from them
    code     plain source text
    repeat   random tokens, three times in a row
    pointer  numbered lines of random tokens, then tokens, each followed by the number of its line
    corrupt  a window in which one to five words are replaced by a random one, then the edits that name line and word, from top to bottom
    lookup   a window, then questions for the line number of a name and for the text of a line

``repeat`` and ``pointer`` give a signal on nearly every token and can't be learned but by copying. ``CURRICULUM`` begins with them alone:
heads that copy then form within 0.3 M tokens; mixed with code from the start they had not formed after 1 M.

Names of functions and variables, paths and line numbers are replaced at random in every document, so that copying from the context is
the only way to get them right.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from strop.agent.compact import ARG, END, SPECIAL_TOKENS, SYSTEM_PROMPT
from strop.core.random import generator
from strop.midtrain.base.cases import NAME, WINDOW_ABOVE, CaseMaker, Window, choose_edits
from strop.midtrain.base.corpus import Module
from strop.midtrain.base.failures import DASH, Suspect, failing_tests
from strop.midtrain.base.mixture import CURRICULUM, KIND_SHARES
from strop.midtrain.base.names import NameMaker
from strop.midtrain.base.writer import Document, StreamWriter
from strop.tasks.mutation import Edit, apply_edit, candidate_edits

BUGS = (0.25, 0.2, 0.2, 0.15, 0.1, 0.1)
"""Chances of one to six bugs in a ``repair`` document."""
WRONG_TRIES = (0.35, 0.3, 0.2, 0.15)
"""Chances of none to three wrong edits, each undone, before the repair of an ``episode``: what has failed tells what is left."""
EDIT_WEIGHT = 3.0
"""Weight of what an edit says against other actions: finding the bug is the hard part, and a small part of the tokens."""
ARRIVE_WEIGHT = 2.0
"""Weight of what ``search`` and ``read`` say: an episode that never sees the function has lost."""
MAX_FILES = 100
INSTRUCTION = "The tests fail. Find the bug and repair it.\n\n"
_WORD = re.compile(r"[a-zA-Z_]{2,}")


@dataclass(frozen=True, slots=True)
class _Scene:
    """Where an imitation episode has arrived: the window and its broken lines, the repair, the file's number and path, the failure."""

    window: Window
    lines: list[str]
    repair: Edit
    file: str
    path: str
    failure: str


class DocumentMaker:
    """Makes documents from a corpus.

    Args:
        modules: The corpus.
        tokenizer: From ``content_tokenizer``.
        seed: Fixes everything.
    """

    def __init__(self, modules: list[Module], tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._paths = sorted({m.path for m in modules})
        vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
        self._no_numbers = np.sort([i for token, i in vocabulary.items() if i >= len(SPECIAL_TOKENS) and not token.isdigit()])
        self.number_ids = sorted(i for token, i in vocabulary.items() if token.isdigit() and len(token) in (2, 3))
        """Ids of numbers of two or three digits: almost all line numbers."""
        self._names = NameMaker(f.name for m in modules for f in m.functions)
        self._cases = CaseMaker(modules, self._names)

    def make(self, index: int, kind: str | None = None) -> Document:
        """Return document ``index``; ``kind`` overrides the random choice."""
        rng = generator("document", self._seed, index)
        shares = next((shares for end, shares in CURRICULUM if index < end), KIND_SHARES)
        chosen = str(rng.choice(list(shares), p=list(shares.values())))
        return getattr(self, "_" + (kind or chosen))(rng)

    def make_single_repair(self, index: int) -> Document:
        """Return a ``repair`` document with exactly one bug, for the gate."""
        return self._repair(generator("gate", self._seed, index), bugs=1)

    def decode(self, token_ids: np.ndarray) -> str:
        """Return the text of ``token_ids``."""
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)

    def _writer(self, rng: np.random.Generator, **options: float) -> StreamWriter:
        return StreamWriter(self._tokenizer, rng, **options)

    def _identifier(self, rng: np.random.Generator) -> str:
        return self._names.make(rng)

    # ------------------------------------------------------------------------------------------------ documents

    def _repair(self, rng: np.random.Generator, bugs: int | None = None) -> Document:
        writer = self._writer(rng)
        window, lines, repairs = self._cases.case(rng, bugs or int(rng.choice(6, p=BUGS)) + 1, short=bugs is None and rng.random() < 0.7)
        file = str(rng.integers(1, 40))
        writer.start(f"{INSTRUCTION}{window.name}", None)
        writer.act("read", [file, str(window.first + WINDOW_ABOVE)], learned=0)  # nothing said which file and line
        writer.observe(window.numbered(lines))
        for repair in sorted(repairs, key=lambda edit: edit.line):  # from top to bottom: in any order, the line would be left to chance
            self._write_edit(writer, window, lines, repair, file)
        return writer.finish()

    def _corrupt(self, rng: np.random.Generator) -> Document:
        writer = self._writer(rng)
        window = self._cases.window(rng, short=True)
        lines = list(window.lines)
        filled = [number for number, line in enumerate(lines) if _WORD.search(line)]
        repairs: list[Edit] = []
        for number in sorted(rng.permutation(filled)[: int(rng.integers(1, 6))].tolist()):
            words = list(_WORD.finditer(lines[number]))
            word = words[int(rng.integers(0, len(words)))]
            strange = self._strange_word(rng)
            if strange in lines[number]:
                continue
            lines[number] = lines[number][: word.start()] + strange + lines[number][word.end() :]
            repairs.append(Edit(kind="corrupt", line=number + 1, old=strange, new=word.group()))
        file = str(rng.integers(1, 40))
        writer.start(f"{INSTRUCTION}{window.name}", None)
        writer.act("read", [file, str(window.first + WINDOW_ABOVE)], learned=0)
        writer.observe(window.numbered(lines))
        for repair in repairs:
            self._write_edit(writer, window, lines, repair, file, learned=3)
        return writer.finish()

    def _strange_word(self, rng: np.random.Generator) -> str:
        while True:
            word = self.decode(rng.integers(len(SPECIAL_TOKENS), self._tokenizer.get_vocab_size(), size=1)).strip()
            if _WORD.fullmatch(word):
                return word

    def _write_edit(
        self, writer: StreamWriter, window: Window, lines: list[str], edit: Edit, file: str, *, learned: int | None = None
    ) -> None:
        """Write the call and its answer; returns the lines afterwards (``lines`` itself changes too)."""
        number = window.first + edit.line - 1
        writer.act("edit", [file, edit.old, str(number), edit.new], learned=learned, emphasis=EDIT_WEIGHT)
        lines[:] = apply_edit("\n".join(lines), edit).split("\n")
        writer.observe(f"ok\n{number}|{lines[edit.line - 1]}")

    def _arrive(self, rng: np.random.Generator, writer: StreamWriter) -> _Scene:
        """Write an episode up to the ``read`` of the function with the bug."""
        window, lines, (repair,) = self._cases.case(rng, 1)
        tree = self._tree(rng)
        file = int(rng.integers(0, len(tree)))
        failure = self._failure(rng, window, lines, repair.line, tree[file])
        writer.start(INSTRUCTION + failure, SYSTEM_PROMPT if rng.random() < 0.6 else None)
        index = file + 1
        if rng.random() < 0.15:
            writer.act("list", [])
            writer.observe("\n".join(f"[{i}] {p}" for i, p in enumerate(tree, 1)))
        else:  # numbers of larger trees than are worth listing
            index = int(rng.integers(1, MAX_FILES))
        self._write_search(rng, writer, window, index, tree[file])
        writer.act("read", [str(index), str(window.first + self._defining(window))], emphasis=ARRIVE_WEIGHT)
        return _Scene(window, lines, repair, str(index), tree[file], failure)

    def _navigate(self, rng: np.random.Generator) -> Document:
        writer = self._writer(rng, observed_weight=0.0)
        self._arrive(rng, writer)
        return writer.finish()

    def _episode(self, rng: np.random.Generator) -> Document:
        writer = self._writer(rng)
        scene = self._arrive(rng, writer)
        window, lines, file = scene.window, scene.lines, scene.file
        writer.observe(window.numbered(lines))
        broken = list(lines)
        for _ in range(int(rng.choice(4, p=WRONG_TRIES))):
            wrong = choose_edits(rng, candidate_edits("\n".join(broken), window.span), 1)
            if not wrong or wrong[0] == scene.repair:
                break
            number = window.first + wrong[0].line - 1
            self._write_edit(writer, window, lines, wrong[0], file, learned=0)
            writer.act("test", [])
            again = rng.random() < 0.6
            writer.observe(scene.failure if again else self._failure(rng, window, lines, scene.repair.line, scene.path))
            writer.act("undo", [])
            lines = list(broken)
            writer.observe(f"ok\n{number}|{lines[wrong[0].line - 1]}")
        self._write_edit(writer, window, lines, scene.repair, file)
        writer.act("test", [])
        writer.observe(f"{DASH}\nRan 8 tests\n\nOK")
        writer.act("submit", [])
        return writer.finish()

    def _defining(self, window: Window) -> int:
        """Row of the line that defines the function: decorators may stand above."""
        rows = range(window.span.start_line - 1, window.span.end_line)
        return next((row for row in rows if f"def {window.name}" in window.lines[row]), window.span.start_line - 1)

    def _write_search(self, rng: np.random.Generator, writer: StreamWriter, window: Window, index: int, path: str) -> None:
        row = self._defining(window)
        pattern = f"def {window.name}"
        hits = [(index, path, window.first + row, window.lines[row])]
        if rng.random() < 0.3:
            pattern = window.name
            for _ in range(int(rng.integers(0, 3))):
                other = f"    {self._identifier(rng)} = {window.name}(value)"
                hits.append((int(rng.integers(1, MAX_FILES)), f"{self._identifier(rng)}.py", int(rng.integers(1, 900)), other))
        writer.act("search", [pattern], emphasis=ARRIVE_WEIGHT)
        writer.observe("\n".join(f"[{i}] {p}:{n}:{line}" for i, p, n, line in sorted(hits)))

    def _copy(self, rng: np.random.Generator) -> Document:
        writer = self._writer(rng, observed_weight=0.05)
        name = self._identifier(rng)
        tree = self._tree(rng)
        writer.start(f"{INSTRUCTION}{self._traceback(rng, name, str(rng.choice(tree)))}", SYSTEM_PROMPT if rng.random() < 0.3 else None)
        for _ in range(2):
            file, line = int(rng.integers(0, len(tree))), int(rng.integers(1, 1200))
            if rng.random() < 0.5:
                writer.act("search", [f"def {name}"])
                writer.observe(f"[{file + 1}] {tree[file]}:{line}:def {name}({self._identifier(rng)}):")
                writer.act("read", [str(file + 1), str(line)])
                writer.observe("\n".join(f"{n}|    {self._identifier(rng)} = {name}" for n in range(max(1, line - 2), line + 3)))
            else:
                number, old, new = line + int(rng.integers(0, 4)), self._identifier(rng), self._identifier(rng)
                writer.act("list", [])
                writer.observe("\n".join(f"[{i}] {p}" for i, p in enumerate(tree, 1)), last=True)
                writer.ask(f"{old} in {tree[file]} near line {line} must be {new}")
                writer.act("read", [str(file + 1), str(line)])
                rows = [f"{n}|    {old if n == number else self._identifier(rng)} = {name}" for n in range(max(1, line - 2), line + 6)]
                writer.observe("\n".join(rows))
                writer.act("edit", [str(file + 1), old, str(number), new])
                writer.observe(f"ok\n{number}|    {new} = {name}")
        writer.act("submit", [])
        return writer.finish()

    def _code(self, rng: np.random.Generator) -> Document:
        writer = self._writer(rng, observed_weight=0.25, observed_share=0.5)
        window = self._cases.window(rng)
        writer.raw("\n".join(window.lines))
        return writer.finish()

    def _repeat(self, rng: np.random.Generator) -> Document:
        writer = self._writer(rng)
        length = int(rng.integers(8, 60))
        ids = rng.integers(len(SPECIAL_TOKENS), self._tokenizer.get_vocab_size(), size=length).tolist()
        writer.tokens(ids, weight=0.0)
        for _ in range(2):
            writer.tokens([END], weight=0.0)
            writer.tokens(ids, weight=1.0)
        return writer.finish()

    def _pointer(self, rng: np.random.Generator) -> Document:
        writer = self._writer(rng)
        count = int(rng.integers(4, 20))
        first = int(rng.integers(1, 980))
        widths = rng.integers(1, 9, size=count)
        words = rng.choice(self._no_numbers, size=int(widths.sum()), replace=False)
        places = np.repeat(np.arange(count), widths)
        for row in range(count):
            writer.tokens(self._encode(f"{first + row}|"), weight=0.0)
            writer.tokens(words[places == row].tolist(), weight=0.0)
            writer.tokens(self._encode("\n"), weight=0.0)
        for index in rng.integers(0, len(words), size=24).tolist():
            writer.tokens([ARG, int(words[index]), ARG], weight=0.0)
            writer.tokens(self._encode(str(first + int(places[index]))), weight=1.0)
        return writer.finish()

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _lookup(self, rng: np.random.Generator) -> Document:
        writer = self._writer(rng, observed_weight=0.05)
        window = self._cases.window(rng)
        writer.start(window.name, None)
        file = str(rng.integers(1, 40))
        writer.act("read", [file, str(window.first + WINDOW_ABOVE)], learned=0)
        writer.observe(window.numbered(), last=True)
        found: dict[str, set[int]] = {}
        for number, line in enumerate(window.lines):
            for word in NAME.findall(line):
                found.setdefault(word, set()).add(number)
        unique = [(word, min(places)) for word, places in sorted(found.items()) if len(places) == 1]
        filled = [number for number, line in enumerate(window.lines) if line.strip()]
        for _ in range(int(rng.integers(4, 11))):
            if unique and rng.random() < 0.6:
                word, number = unique[int(rng.integers(0, len(unique)))]
                writer.ask(word)
                writer.act("read", [file, str(window.first + number)])
            else:
                number = filled[int(rng.integers(0, len(filled)))]
                writer.ask(str(window.first + number))
                writer.act("search", [window.lines[number].strip()])
        return writer.finish()

    def _tree(self, rng: np.random.Generator) -> list[str]:
        package = self._identifier(rng).lower().strip("_")
        count = int(rng.integers(2, 25))
        stems = {str(self._paths[int(i)]).rsplit("/", 1)[-1] for i in rng.integers(0, len(self._paths), size=count)}
        stems |= {self._identifier(rng).lower() + ".py" for _ in range(int(rng.integers(1, 5)))}
        return sorted(f"{package}/{stem}" for stem in stems)

    def _failure(self, rng: np.random.Generator, window: Window, lines: list[str], bug: int, path: str) -> str:
        inside = range(window.span.start_line - 1, window.span.end_line)
        frames = tuple((window.first + row, lines[row]) for row in inside if lines[row].strip())
        rows = [number for number, _ in frames]
        return failing_tests(rng, Suspect(name=window.name, path=path, frames=frames, bug=rows.index(window.first + bug - 1)))

    def _traceback(self, rng: np.random.Generator, name: str, path: str) -> str:
        line = int(rng.integers(1, 1200))
        return (
            f'Traceback (most recent call last):\n  File "/workspace/{path}", line {line}, in {name}\nValueError: {self._identifier(rng)}'
        )
