"""Talks to ``reasoning-gym``: JSON on standard input, one line of JSON on standard output.

    python reasoning_gym_side.py make  {"dataset", "seed", "size", "config"} -> {"version", "rows": [{question, answer}]}
    python reasoning_gym_side.py score {"dataset", "seed", "size", "config", "index", "question", "answer"} -> {"score"}

A second argument is a folder of packages to import from. Scoring makes the task again from its seed, so that nothing that JSON can't say is
lost, and refuses if another version of the package makes another task of it. An answer that makes the judge raise scores 0 if an ordinary
one doesn't.
"""

from __future__ import annotations

import importlib
import json
import sys
from importlib import metadata
from typing import Any

PACKAGE = "reasoning-gym"
CONTROL = "0"
"""An ordinary answer."""


def make(package: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return the tasks of a dataset."""
    dataset = _dataset(package, request)
    rows = []
    for index in range(request["size"]):
        entry = dataset[index]
        answer = entry["answer"]
        # Where many answers are right, some datasets give none.
        rows.append({"question": str(entry["question"]), "answer": answer if isinstance(answer, str | None) else json.dumps(answer)})
    return {"version": metadata.version(PACKAGE), "rows": rows}


def score(package: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return the score of an answer, between 0 and 1."""
    dataset = _dataset(package, request)
    entry = dataset[request["index"]]
    if str(entry["question"]) != request["question"]:
        return {"error": f"{PACKAGE} {metadata.version(PACKAGE)} makes another task from this seed; install the version that made it"}
    try:
        return {"score": float(dataset.score_answer(request["answer"], entry))}
    except Exception as error:
        dataset.score_answer(CONTROL, entry)
        return {"score": 0.0, "raised": type(error).__name__}


def _dataset(package: Any, request: dict[str, Any]) -> Any:
    known = importlib.import_module("reasoning_gym.factory").DATASETS
    if request["dataset"] not in known:
        raise LookupError(json.dumps(sorted(known)))
    return package.create_dataset(request["dataset"], seed=request["seed"], size=request["size"], **request["config"])


def main(argv: list[str]) -> int:
    """Answer one request."""
    if len(argv) > 1:
        sys.path.append(argv[1])
    request = json.load(sys.stdin)
    try:
        package = importlib.import_module("reasoning_gym")
    except ImportError as error:
        answer: dict[str, Any] = {"missing": PACKAGE, "error": str(error)}
    else:
        try:
            answer = {"make": make, "score": score}[argv[0]](package, request)
        except LookupError as error:
            answer = {"unknown": request["dataset"], "known": json.loads(str(error.args[0]))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
