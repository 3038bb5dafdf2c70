"""Talks to a ``verifiers`` taskset (its v1 interface): JSON on standard input, one line of JSON on standard output.

    python verifiers_side.py make  {"taskset": "module:Class", "config", "size"}           -> {"version", "rows": [{data, key, question}]}
    python verifiers_side.py score {"taskset", "config", "index", "key", "answer"}         -> {"score", "parts"}

A second argument is a folder of packages to import from. Only tasks that are judged by their last reply can be scored here: one that wants
a container, or a reward that wants a runtime, is refused. A reply that makes a reward raise scores 0 if an ordinary one doesn't.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import json
import sys
from importlib import metadata
from typing import Any

PACKAGE = "verifiers"
CONTROL = "0"
"""An ordinary reply."""


def make(request: dict[str, Any]) -> dict[str, Any]:
    """Return the first tasks of a taskset."""
    rows = []
    for task in itertools.islice(_taskset(request), request["size"]):
        _check(task)
        rows.append({"data": task.data.model_dump(mode="json"), "key": task.key, "question": task.data.prompt_text})
    return {"version": metadata.version(PACKAGE), "rows": rows}


def score(request: dict[str, Any]) -> dict[str, Any]:
    """Return the reward of a reply, and its parts."""
    task = next(itertools.islice(_taskset(request), request["index"], None), None)
    if task is None or task.key != request["key"]:
        return {"error": f"the taskset has another task at {request['index']} than when it was imported"}
    _check(task)
    trace = _trace(task, request["answer"])
    try:
        asyncio.run(task.score(trace))
    except Exception as error:
        asyncio.run(task.score(_trace(task, CONTROL)))
        return {"score": 0.0, "raised": type(error).__name__}
    return {"score": float(trace.reward), "parts": {name: reward.score for name, reward in trace.rewards.items() if reward is not None}}


def _taskset(request: dict[str, Any]) -> Any:
    module, _, name = request["taskset"].partition(":")
    cls = getattr(importlib.import_module(module), name)
    base = importlib.import_module("verifiers.v1.configs.taskset").TasksetConfig
    concrete = importlib.import_module("verifiers.v1.utils.generic").concrete_type
    return cls((concrete(cls, base) or base)(**request["config"]))


def _check(task: Any) -> None:
    wanted = [fn.__name__ for fn in task.hooks("reward") if _wants_runtime(fn)]
    if task.NEEDS_CONTAINER or task.data.image:
        raise ValueError("the task wants a container; run it with verifiers, or import it as a Harbor task")
    if wanted:
        raise ValueError(f"the reward {wanted[0]!r} wants a runtime; only rewards of the last reply can be scored here")


def _wants_runtime(function: Any) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _trace(task: Any, reply: str) -> Any:
    """A finished run of one turn: prompt and reply."""
    graph, types, traces = (importlib.import_module(f"verifiers.v1.{name}") for name in ("graph", "types", "trace"))
    config = importlib.import_module("verifiers.v1.configs.agent").AgentConfig
    nodes = [
        graph.MessageNode(message=types.UserMessage(content=task.data.prompt_text)),
        graph.MessageNode(parent=0, message=types.AssistantMessage(content=reply), sampled=True),
    ]
    held = traces.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    return traces.Trace(task=held, agent=traces.AgentInfo(config=config()), nodes=nodes, is_completed=True, ok=True)


def main(argv: list[str]) -> int:
    """Answer one request."""
    if len(argv) > 1:
        sys.path.append(argv[1])
    request = json.load(sys.stdin)
    try:
        importlib.import_module("verifiers.v1")
    except ImportError as error:
        answer: dict[str, Any] = {"missing": PACKAGE, "error": str(error)}
    else:
        try:
            answer = {"make": make, "score": score}[argv[0]](request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
