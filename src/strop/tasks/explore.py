"""Exploring a function inside the box: calls that give plain data, and which edits of the function they detect.

``strop.tasks.inside`` calls this in a child process of its own for each function.
"""

from __future__ import annotations

import collections.abc
import importlib
import inspect
import itertools
import random
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from strop.tasks import fuzz
from strop.tasks.mutation import FunctionSpan, apply_edit, candidate_edits
from strop.tasks.values import UnencodableError, canonical, decode_value, encode_value, to_source
from strop.tasks.verifier import DRAIN_LIMIT, observe

CALL_LIMIT_S = 0.04
MAX_ARGS_CHARS = 110
MAX_RESULT_CHARS = 150
NATURAL_ERRORS = frozenset(
    {"ValueError", "KeyError", "IndexError", "ZeroDivisionError", "OverflowError", "UnicodeDecodeError", "UnicodeEncodeError"}
)
CLOCKS = frozenset(
    {
        *("now", "today", "utcnow", "time", "time_ns", "monotonic", "perf_counter", "localtime", "gmtime", "getenv", "open", "urandom"),
        *("getrandbits", "random", "stat", "lstat", "listdir", "scandir", "getcwd", "gethostname", "getpid", "getlocale", "setlocale"),
        *("fork_exec", "system", "select", "connect", "recv", "input", "readline", "id"),
    }
)
"""Built-ins whose answer depends on the machine or the moment."""


class TooLongError(BaseException):
    """A call ran past its limit. Not an ``Exception``: the code under test must not catch it."""


def raise_too_long(_: int, __: FrameType | None) -> None:
    """Signal handler that ends a call."""
    raise TooLongError


def limited(function: Callable[[], Any], limit_s: float = CALL_LIMIT_S) -> Any:
    """Call ``function``; raises ``TooLongError`` after ``limit_s`` seconds."""
    # Processor time, so that a busy machine changes nothing; what sleeps instead is ended by the request's deadline.
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        return function()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def load(tree: str, module: str) -> tuple[ModuleType, int]:
    """Import ``module`` from ``tree``; returns it with the number of modules that this loaded."""
    sys.path.insert(0, tree)
    before = len(sys.modules)
    return importlib.import_module(module), len(sys.modules) - before


def rebind(module: ModuleType, text: str, name: str) -> Callable[..., Any]:
    """Define a module-level function anew from the source text of its definition, decorators included."""
    exec(compile(text, module.__file__ or "module", "exec"), module.__dict__)
    return module.__dict__[name]


class Explorer:
    """Finds calls of one function that return plain data, in a deterministic order.

    Args:
        function: The function.
        parameters: Its parameters.
        literals: Constants of its module.
        seed: Fixes the search.
        errors: Names of exceptions that may be expected results.
    """

    def __init__(
        self, function: Callable[..., Any], parameters: list[fuzz.Parameter], literals: fuzz.Literals, seed: int, errors: frozenset[str]
    ) -> None:
        self._function = function
        self._parameters = parameters
        self._literals = literals
        self._errors = errors
        self._rng = random.Random(seed)
        self.cases: dict[str, dict[str, Any]] = {}
        self.drains: dict[bool, int] = {False: 0, True: 0}
        self.slow = 0

    def attempt(self, args: list[Any], kwargs: dict[str, Any], harvested: bool) -> bool:
        """Try one encoded call; returns whether it gave a usable result."""
        key = canonical([args, kwargs])
        if key in self.cases or self.slow > 8 or sum(len(to_source(item)) + 2 for item in (*args, *kwargs.values())) > MAX_ARGS_CHARS:
            return False
        try:
            outcome = limited(lambda: self._call(args, kwargs))
        except TooLongError:
            self.slow += 1
            return False
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            return False
        if outcome is None:
            return False
        self.cases[key] = {"args": args, "kwargs": kwargs, "harvested": harvested, **outcome}
        return "raises" not in outcome

    def _call(self, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        values = [decode_value(item) for item in args]
        named = {name: decode_value(item) for name, item in kwargs.items()}
        try:
            result = self._function(*values, **named)
            drain = isinstance(result, collections.abc.Iterator)
            if drain:
                result = list(itertools.islice(result, DRAIN_LIMIT))
                if len(result) == DRAIN_LIMIT:
                    return None
            encoded = encode_value(result)
        except UnencodableError:
            return None
        except Exception as error:
            name = type(error).__name__
            return {"raises": name} if name in self._errors else None
        if len(to_source(encoded)) > MAX_RESULT_CHARS or result != decode_value(encoded):
            return None
        self.drains[drain] += 1
        return {"expected": encoded, "drain": drain}

    def run(self, harvested: list[tuple[list[Any], dict[str, Any]]], wanted: int) -> None:
        """Search until ``wanted`` cases are found or the attempts are used up."""
        for args, kwargs in harvested:
            self.attempt(args, kwargs, True)
        shapes: dict[fuzz.Shape, int] = {}
        start = time.process_time()
        for index in range(900):
            hopeless = len(self.cases) < index // 100 or (index == 200 and len(self.cases) < 6)
            if len(self.cases) >= wanted or hopeless or time.process_time() - start > 3.0:
                break
            known = list(shapes)
            fresh = not known or (index < 250 and self._rng.random() < 0.5)
            shape = fuzz.random_shape(self._parameters, self._rng) if fresh else self._rng.choices(known, list(shapes.values()))[0]
            args, kwargs = fuzz.random_call(self._parameters, shape, self._rng, self._literals)
            try:
                call = [encode_value(item) for item in args], {name: encode_value(item) for name, item in kwargs.items()}
            except UnencodableError:
                continue
            if self.attempt(*call, False):
                shapes[shape] = shapes.get(shape, 0) + 1


def uses_clock(function: Callable[..., Any], cases: list[dict[str, Any]], drain: bool) -> str:
    """Return the name of a built-in that the calls use and whose answer depends on the machine, or ``""``."""
    used: set[str] = set()

    def profile(_: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and argument.__name__ in CLOCKS:
            used.add(argument.__name__)

    for case in cases:
        sys.setprofile(profile)
        try:
            limited(lambda case=case: observe(function, case["args"], case["kwargs"], drain=drain), 0.5)
        except TooLongError:
            return "time limit"
        finally:
            sys.setprofile(None)
    return min(used, default="")


def explore(request: dict[str, Any]) -> dict[str, Any]:
    """Find cases of a function and say which candidate edits they detect.

    Returns:
        ``cases``, ``drain`` and ``kills``: for each candidate edit its four fields and the indices of the
        cases that it fails, or ``None`` if it hangs; or ``refused`` with the reason.
    """
    module, num_modules = load(request["tree"], request["module"])
    source = request["source"]
    if num_modules > request["max_modules"]:
        return {"refused": "slow import"}
    span = FunctionSpan(*request["span"])
    function = getattr(module, span.name, None)
    if not callable(function) or isinstance(function, type):
        return {"refused": "not a function"}
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or code.co_filename != module.__file__ or code.co_name != span.name:
        return {"refused": "defined elsewhere"}
    if not (request["first_line"] <= code.co_firstlineno <= span.start_line):
        return {"refused": "defined twice"}
    try:
        parameters = fuzz.parameters_of(inspect.signature(function))
    except (ValueError, TypeError):
        parameters = None
    if parameters is None:
        return {"refused": "signature"}
    lines = source.split("\n")
    body = "\n".join(lines[span.start_line - 1 : span.end_line])
    errors = NATURAL_ERRORS | ({"TypeError"} if "raise TypeError" in body else set())
    explorer = Explorer(function, parameters, fuzz.Literals(*request["literals"]), request["seed"], errors)
    explorer.run(request["calls"], request["wanted"])
    drain = explorer.drains[True] > explorer.drains[False]
    cases = [case for case in explorer.cases.values() if "raises" in case or case["drain"] == drain]
    values = {canonical(case["expected"]) for case in cases if "raises" not in case}
    if len(cases) < request["needed"] or len(values) < 2:
        return {"refused": "too few cases"}
    clock = uses_clock(function, cases, drain)
    if clock:
        return {"refused": f"uses {clock}"}
    again = [check(function, case, drain) for case in cases]
    cases = [case for case, same in zip(cases, again, strict=True) if same]
    if len(cases) < request["needed"]:
        return {"refused": "not repeatable"}
    kills = kill_matrix(module, source, span, request["first_line"], cases, drain)
    return {"cases": cases, "drain": drain, "kills": kills}


def check(function: Callable[..., Any], case: dict[str, Any], drain: bool) -> bool:
    """Whether a call still gives the expected result, by ``==`` as a unit test would compare it."""
    raises = case.get("raises")
    try:
        values = [decode_value(item) for item in case["args"]]
        result = function(*values, **{name: decode_value(item) for name, item in case["kwargs"].items()})
        if drain:
            result = list(itertools.islice(result, DRAIN_LIMIT))
        return raises is None and bool(result == decode_value(case["expected"]))
    except Exception as error:
        return raises is not None and type(error).__name__ == raises


def kill_matrix(
    module: ModuleType, source: str, span: FunctionSpan, first_line: int, cases: list[dict[str, Any]], drain: bool
) -> list[tuple[str, int, str, str, list[int] | None]]:
    """Run every candidate edit of the function against every case."""
    rows = []
    for edit in candidate_edits(source, span):
        lines = apply_edit(source, edit).split("\n")
        failed: list[int] | None = []
        try:
            mutant = limited(lambda lines=lines: rebind(module, "\n".join(lines[first_line - 1 : span.end_line]), span.name), 0.5)
            for index, case in enumerate(cases):
                if not limited(lambda case=case, mutant=mutant: check(mutant, case, drain)):
                    failed.append(index)
        except (TooLongError, MemoryError, SystemExit, KeyboardInterrupt, GeneratorExit):
            failed = None
        except Exception:
            # The edit broke the definition itself (a default value, a decorator): every test fails to import.
            failed = None
        rows.append((edit.kind, edit.line, edit.old, edit.new, failed))
    return rows
