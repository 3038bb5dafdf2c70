"""Run ``python ARGV`` in this process exactly as the interpreter would, from a process that was forked ready. Standard library only.

What differs from a fresh interpreter: modules of the standard library that are already loaded win over files of the same name in
the workspace, and objects still alive at exit are not finalised one by one.
"""

import atexit
import builtins
import io
import os
import runpy
import sys
import threading
import types
from importlib.machinery import BuiltinImporter, SourceFileLoader
from typing import Any


def can_run(argv: list[str]) -> bool:
    """Whether ``argv`` is one of the forms handled here: ``-m MODULE``, ``-c CODE``, ``SCRIPT``."""
    if not argv:
        return False
    return len(argv) >= 2 if argv[0] in ("-m", "-c") else not argv[0].startswith("-")


def run(argv: list[str], executable: str) -> int:
    """Run and return the exit status that ``python`` would have."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=builtins, __loader__=BuiltinImporter)
    sys.modules["__main__"] = main
    sys.orig_argv = [executable, *argv]
    status = 0
    try:
        if argv[0] == "-m":
            sys.argv = ["-m", *argv[2:]]
            sys.path.insert(0, os.getcwd())
            runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]
        elif argv[0] == "-c":
            sys.argv = ["-c", *argv[2:]]
            sys.path.insert(0, "")
            exec(compile(argv[1], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = list(argv)
            status = _run_script(argv[0], main.__dict__, executable)
    except BaseException:
        if argv[0] not in ("-m", "-c"):
            _flush_quietly()  # the interpreter does so for scripts only, which shows in the order of output
        status = _report(*sys.exc_info())
    return _finish(status)


def _run_script(path: str, namespace: dict[str, Any], executable: str) -> int:
    path = os.path.abspath(path)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except IsADirectoryError:
        sys.path.insert(0, path)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return 0
    except OSError as error:
        print(f"{executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        return 2
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    namespace.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    exec(compile(source, path, "exec"), namespace)
    return 0


def _report(kind: Any, error: Any, trace: Any) -> int:
    """Do with an uncaught exception what the interpreter does, without this module's own frames in the traceback."""
    if kind is SystemExit:
        code = error.code
        if code is None:
            return 0
        if isinstance(code, int):
            return code & 0xFF
        print(code, file=sys.stderr)
        return 1
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.excepthook(kind, error, trace)
    return 1


def _flush_quietly() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue


def _finish(status: int) -> int:
    """Wait for threads, run exit handlers, flush: the visible part of an interpreter's end."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        status = _report(*sys.exc_info())
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            status = 120
    return status
