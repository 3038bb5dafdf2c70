"""Build the repair pool: ``python -m strop.tasks.build --out DIR``.

Stages: fetch sources, prepare functions (cases and viable mutants), choose mutants, admit them through the gate, write the pool. The
first two that take long are kept by tree in ``DIR.work``, so an interrupted build goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.core.errors import StropError
from strop.core.random import key_of
from strop.tasks.box import Box
from strop.tasks.factory import Candidate, Prepared, digests_of, find_candidates, prepare, task_id_of
from strop.tasks.gate import Admitted, Gate
from strop.tasks.mutation import IDENTIFIER_KINDS, Edit, FunctionSpan
from strop.tasks.poolfile import FORMAT, FunctionRecord, TaskRecord, write_lines, write_tree_archive
from strop.tasks.selection import Quota, choose_mutants, drop_duplicates
from strop.tasks.sources import Tree, example_texts, fetch, load_table, read_tree
from strop.tasks.split import HELDOUT_PERCENT
from strop.tasks.trees import make_once, write_tree
from strop.tasks.verifier import Verifier

QUOTAS = {"train": Quota(2200, 10), "heldout": Quota(420, 8), "hard": Quota(120, 4, 0.5)}
MIN_HARD_FILES = 3
OTHER_ENVIRONMENT = {"TZ": "Asia/Tokyo", "HOME": "/nonexistent", "COLUMNS": "40", "USER": "someone"}


@dataclass(slots=True)
class Progress:
    """Prints how far a stage is, its rate and the time left.

    Attributes:
        stage: Its name.
        total: Units of work.
        unit: Name of a unit.
    """

    stage: str
    total: int
    unit: str
    done: int = 0
    started: float = field(default_factory=time.monotonic)
    shown: float = 0.0

    def advance(self, count: int, note: str = "") -> None:
        """Count ``count`` units; prints at most every two seconds and at the end."""
        self.done += count
        now = time.monotonic()
        if now - self.shown < 2 and self.done < self.total:
            return
        self.shown = now
        rate = self.done / max(now - self.started, 1e-9)
        left = (self.total - self.done) / rate if rate else 0.0
        print(f"{self.stage}: {self.done}/{self.total} {self.unit}, {rate:.1f}/s, {left:.0f} s left {note}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Build:
    """Everything that a build has found so far."""

    out: Path
    seed: int
    limit: int
    workers: int
    trees: dict[str, Tree] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    digests: dict[str, set[str]] = field(default_factory=lambda: {"train": set(), "heldout": set()})

    @property
    def work(self) -> Path:
        """Where finished parts are kept."""
        return self.out.with_name(self.out.name + ".work")

    def lay_trees(self, wheels: Path) -> dict[str, list[Candidate]]:
        """Fetch and lay out every source; returns the candidates by tree."""
        sources = load_table()
        fetch(sources, wheels)
        found = {}
        progress = Progress("sources", len(sources), "trees")
        for source in sources:
            tree = read_tree(source, wheels)
            self.trees[tree.tree_id] = tree
            make_once(self.work / "trees" / tree.tree_id, lambda folder, tree=tree: write_tree(tree.files, folder))
            for split, digest in digests_of(tree):
                self.digests[split].add(digest)
            candidates = find_candidates(tree, example_texts(tree, wheels), self.refused)
            found[tree.tree_id] = self._sample(candidates)
            progress.advance(1)
        return found

    def _sample(self, candidates: list[Candidate]) -> list[Candidate]:
        """Keep ``limit`` candidates of each split and length, chosen by hash."""
        groups: Counter[tuple[str, bool]] = Counter()
        kept = []
        for candidate in sorted(candidates, key=lambda item: key_of("sample", self.seed, item.tree_id, item.cluster)):
            group = (candidate.split, candidate.is_long)
            groups[group] += 1
            # Long functions of training modules never become tasks.
            if group != ("train", True) and (not self.limit or groups[group] <= self.limit):
                kept.append(candidate)
        return sorted(kept, key=lambda item: (item.path, item.span.start_line))

    def source_of(self, candidate: Candidate) -> str:
        """Text of a candidate's module."""
        return self.trees[candidate.tree_id].files[candidate.path].decode("utf-8")

    def prepare_all(self, candidates: dict[str, list[Candidate]]) -> list[Prepared]:
        """Prepare the functions of every tree, several trees at a time."""
        progress = Progress("functions", sum(map(len, candidates.values())), "functions")

        def prepare_tree(tree_id: str) -> list[Prepared | str]:
            kept = self.work / "prepared" / f"{tree_id}.json"
            known: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
            fresh = 0
            with Box(self.work / "trees") as box:
                for candidate in candidates[tree_id]:
                    if candidate.cluster not in known:
                        found = prepare(box, candidate, self.source_of(candidate), self.seed)
                        known[candidate.cluster] = found if isinstance(found, str) else _dump(found)
                        fresh += 1
                        if fresh % 20 == 0:
                            _write_json(kept, known)
                    progress.advance(1, tree_id)
            if fresh:
                _write_json(kept, known)
            rows = [(candidate, known[candidate.cluster]) for candidate in candidates[tree_id]]
            return [row if isinstance(row, str) else _load(row, candidate) for candidate, row in rows]

        prepared = []
        with ThreadPoolExecutor(self.workers) as pool:
            for results in pool.map(prepare_tree, candidates):
                prepared.extend(item for item in results if isinstance(item, Prepared))
                self.refused.update(f"function: {item}" for item in results if isinstance(item, str))
        return prepared

    def choose(self, functions: list[Prepared]) -> list[tuple[str, Prepared, list[Edit]]]:
        """Choose the mutants of every split; returns ``(split, function, edits)``."""
        functions, dropped = drop_duplicates(functions, self.digests["train"])
        self.refused["function: duplicate"] += dropped
        short = {split: [p for p in functions if p.candidate.split == split and not p.candidate.is_long] for split in ("train", "heldout")}
        chosen = {split: choose_mutants(short[split], QUOTAS[split], self.seed) for split in short}
        heldout = [p for p in functions if p.candidate.split == "heldout" and self._num_modules(p) >= MIN_HARD_FILES]
        taken = {(p.candidate.cluster, edit) for p, edit in chosen["heldout"]}
        quota = QUOTAS["hard"]
        long = choose_mutants([p for p in heldout if p.candidate.is_long], quota, self.seed, taken=taken)
        names = Quota(max(quota.total - len(long), quota.total // 2), 3, 1.0)
        short_heldout = [p for p in heldout if not p.candidate.is_long]
        chosen["hard"] = long + choose_mutants(short_heldout, names, self.seed, kinds=IDENTIFIER_KINDS, taken=taken)
        grouped: dict[tuple[str, str], tuple[Prepared, list[Edit]]] = {}
        for split, pairs in chosen.items():
            for prepared, edit in pairs:
                key = (split, f"{prepared.candidate.tree_id}/{prepared.candidate.cluster}")
                grouped.setdefault(key, (prepared, []))[1].append(edit)
        return [(split, prepared, edits) for (split, _), (prepared, edits) in grouped.items()]

    def _num_modules(self, prepared: Prepared) -> int:
        return sum(path.endswith(".py") for path in self.trees[prepared.candidate.tree_id].files)

    def admit_all(self, chosen: list[tuple[str, Prepared, list[Edit]]]) -> list[tuple[str, Prepared, Admitted]]:
        """Run the gate over every chosen mutant, kept by tree."""
        by_tree: dict[str, list[tuple[str, Prepared, list[Edit]]]] = {}
        for item in chosen:
            by_tree.setdefault(item[1].candidate.tree_id, []).append(item)
        progress = Progress("gate", sum(len(edits) for _, _, edits in chosen), "mutants")

        def admit_tree(tree_id: str) -> tuple[Counter[str], list[list[Admitted]]]:
            kept = self.work / "gate" / f"{tree_id}.json"
            known: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
            rows = []
            with ExitStack() as stack:
                usual = stack.enter_context(Box(self.work / "trees", with_site=True))
                other = stack.enter_context(Box(self.work / "trees", hash_seed=7, environment=OTHER_ENVIRONMENT))
                gate = Gate(usual, other, self.seed)
                for _, prepared, edits in by_tree[tree_id]:
                    key = f"{prepared.candidate.cluster} {key_of(json.dumps(_dump(prepared))):032x}"
                    rows.append(gate.admit(prepared, self.source_of(prepared.candidate), edits, known.setdefault(key, {})))
                    progress.advance(len(edits), tree_id)
                    if len(rows) % 10 == 0:
                        _write_json(kept, known)
            _write_json(kept, known)
            return gate.refused, rows

        admitted = []
        with ThreadPoolExecutor(self.workers) as pool:
            for tree_id, (refused, rows) in zip(by_tree, pool.map(admit_tree, by_tree), strict=True):
                self.refused.update(refused)
                for (split, prepared, _), items in zip(by_tree[tree_id], rows, strict=True):
                    admitted.extend((split, prepared, item) for item in items)
        return admitted

    def write(self, admitted: list[tuple[str, Prepared, Admitted]]) -> dict[str, Any]:
        """Write the pool directory; returns its ``meta.json``."""
        self.out.mkdir(parents=True, exist_ok=True)
        numbers: dict[str, int] = {}
        functions: list[FunctionRecord] = []
        tasks: list[TaskRecord] = []
        for split, prepared, item in admitted:
            candidate = prepared.candidate
            key = f"{candidate.tree_id}/{candidate.cluster}"
            if key not in numbers:
                numbers[key] = len(functions)
                functions.append(self._function_record(prepared))
            tasks.append(TaskRecord(task_id_of(candidate, item.edit), split, numbers[key], item.edit, item.output, item.failed))
        tasks = _spread(tasks, self.seed)
        used = sorted({record.tree_id for record in functions})
        write_lines(self.out / "functions.jsonl.zst", (record.to_json() for record in functions))
        write_lines(self.out / "tasks.jsonl.zst", (record.to_json() for record in tasks))
        for tree_id in used:
            write_tree_archive(self.out / "trees" / f"{tree_id}.tar.zst", self.trees[tree_id].files)
        (self.out / "heldout_digests.txt").write_text("".join(f"{digest}\n" for digest in sorted(self.digests["heldout"])))
        (self.out / "NOTICE").write_text(_notice([self.trees[tree_id] for tree_id in used]))
        meta = self._meta(functions, tasks)
        (self.out / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        return meta

    def _function_record(self, prepared: Prepared) -> FunctionRecord:
        candidate = prepared.candidate
        source = self.trees[candidate.tree_id].source
        return FunctionRecord(
            tree_id=candidate.tree_id,
            source=f"{source.name} {source.version}",
            licence=source.licence,
            cluster=candidate.cluster,
            span=candidate.span,
            num_edits=prepared.num_edits,
            test_path=prepared.test_path,
            test_text=prepared.test_text,
            verifier=prepared.verifier,
        )

    def _meta(self, functions: list[FunctionRecord], tasks: list[TaskRecord]) -> dict[str, Any]:
        splits = {}
        for split in QUOTAS:
            rows = [task for task in tasks if task.split == split]
            used = {task.function for task in rows}
            edits = [functions[number].num_edits for number in used]
            files = [sum(path.endswith(".py") for path in self.trees[functions[number].tree_id].files) for number in used]
            splits[split] = {
                "tasks": len(rows),
                "functions": len(used),
                "trees": len({functions[number].tree_id for number in used}),
                "kinds": dict(Counter(task.edit.kind for task in rows).most_common()),
                "candidate_edits": {"min": min(edits, default=0), "mean": round(sum(edits) / max(len(edits), 1), 1)},
                "source_files": {"min": min(files, default=0), "median": sorted(files)[len(files) // 2] if files else 0},
            }
        return {
            "format": FORMAT,
            "python": platform.python_version(),
            "seed": self.seed,
            "heldout_percent": HELDOUT_PERCENT,
            "splits": splits,
            "refused": dict(self.refused.most_common()),
        }


def _spread(tasks: list[TaskRecord], seed: int) -> list[TaskRecord]:
    """Order tasks so that any prefix is spread: first one of each function in random order, then a second one of each, and so on."""
    shuffled = sorted(tasks, key=lambda task: key_of("order", seed, task.task_id))
    seen: Counter[tuple[str, int]] = Counter()
    ranked = []
    for task in shuffled:
        ranked.append((seen[task.split, task.function], task))
        seen[task.split, task.function] += 1
    return [task for _, task in sorted(ranked, key=lambda entry: entry[0])]


def _notice(trees: Iterable[Tree]) -> str:
    lines = [
        "The source trees of this task pool are parts of the packages below, unchanged, each with its licence texts inside.",
        "A task changes one line of one function of a tree.",
        "",
    ]
    for tree in trees:
        texts = ", ".join(sorted(path for path in tree.files if not path.endswith(".py"))) or "see the package"
        origin = tree.source.file or "standard library of CPython"
        lines.append(f"{tree.tree_id}: {tree.source.licence}; {origin}; sha256 {tree.source.sha256 or '-'}; licence texts: {texts}")
    return "\n".join(lines) + "\n"


def _edit_row(edit: Edit) -> list[Any]:
    return [edit.kind, edit.line, edit.old, edit.new]


def _dump(prepared: Prepared) -> dict[str, Any]:
    return {
        "path": prepared.candidate.path,
        "span": [prepared.candidate.span.name, prepared.candidate.span.start_line, prepared.candidate.span.end_line],
        "verifier": prepared.verifier.to_json(),
        "test_path": prepared.test_path,
        "test_text": prepared.test_text,
        "num_edits": prepared.num_edits,
        "mutants": [_edit_row(edit) for edit in prepared.mutants],
    }


def _load(data: dict[str, Any], candidate: Candidate) -> Prepared:
    assert candidate.span == FunctionSpan(*data["span"])
    return Prepared(
        candidate,
        Verifier.from_json(data["verifier"]),
        data["test_path"],
        data["test_text"],
        data["num_edits"],
        tuple(Edit(*row) for row in data["mutants"]),
    )


def _write_json(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data))
    part.replace(path)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m strop.tasks.build", description="Build the repair pool from pinned sources.")
    parser.add_argument("--out", type=Path, required=True, help="pool directory to write; DIR.work keeps finished parts")
    parser.add_argument("--wheels", type=Path, help="folder of source archives (default: DIR.work/wheels)")
    parser.add_argument("--seed", type=int, default=0, help="fixes every choice")
    parser.add_argument("--limit", type=int, default=0, help="look at this many functions of each tree and split; 0 means all")
    parser.add_argument("--workers", type=int, default=1, help="trees worked on at the same time")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the build; returns the exit code."""
    arguments = _arguments(argv)
    build = Build(out=arguments.out, seed=arguments.seed, limit=arguments.limit, workers=arguments.workers)
    try:
        candidates = build.lay_trees(arguments.wheels or build.work / "wheels")
        prepared = build.prepare_all(candidates)
        meta = build.write(build.admit_all(build.choose(prepared)))
    except StropError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(meta["splits"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
