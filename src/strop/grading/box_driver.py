"""The program inside the grading box: calls the function under test and writes what it observed. It never sees an expected value.

The host sends this file's code, marshalled, through standard input (see ``protocol.py``), so it uses the standard library and the modules
that travel with it. Agent code runs in this same process and may do anything to it; all it can win is to write answers, and an answer
counts only if it is the right one. What the host relies on is the order of events: ``ready`` is written before any agent code is loaded.
"""

import json
import os
import resource
import signal
import sys
import traceback
import types
from typing import Any

CHANNEL = 100
"""Descriptor of the result channel, away from those that a program opens or closes by habit."""


def write(nonce, text):
    """Write one line to the result channel."""
    data = memoryview(f"{nonce} {text}\n".encode("ascii", "backslashreplace"))
    while data:
        data = data[os.write(CHANNEL, data) :]


def take_channel():
    """Move the result channel away; standard streams become empty."""
    os.dup2(1, CHANNEL)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.close(null)


def load_own(modules):
    """Run the modules that came along and return the last one; none of them stays importable."""
    module: Any = None
    for name, code in modules:
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = []
        exec(code, module.__dict__)
    for name, _ in modules:
        del sys.modules[name]
    return module


def find_function(module, qualname, root):
    """Import ``module`` from the workspace and return the function, whatever of that name was loaded or is installed."""
    package = module.partition(".")[0]
    for name in [name for name in sys.modules if name == package or name.startswith(package + ".")]:
        del sys.modules[name]
    sys.path[:] = [root, *[path for path in sys.path if path not in ("", root) and not path.endswith("-packages")]]
    __import__(module)
    found = sys.modules[module]
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def limit_cpu(seconds, at_limit):
    """Call ``at_limit`` after so many processor seconds from now.

    A handler, because the default action of a signal spares process 1 of a box.
    """
    signal.signal(signal.SIGPROF, lambda number, frame: at_limit())
    signal.setitimer(signal.ITIMER_PROF, seconds)


def play(request, own, function, number):
    """Make the calls of one run."""
    nonce = request["nonce"]
    for position, index in enumerate(request["runs"][number]):
        args, kwargs = request["cases"][index]
        try:
            result, raised = own.observe(function, args, kwargs, drain=request["drain"])
            answer = f"v {own.canonical(result)}" if raised is None else f"e {raised}"
        except BaseException as error:
            answer = f"e {type(error).__name__}"
        write(nonce, f"{number}.{position} {answer}" if len(answer) <= request["max_chars"] else f"{number}.{position} x")


def play_in_child(request, own, function, number):
    """Make the calls of one run in a process of its own; ends this process if that one doesn't end well."""
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
            limit = int(request["cpu_s"]) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            play(request, own, function, number)
            os._exit(77)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        ending = "cpu" if os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGXCPU) else f"signal{os.WTERMSIG(status)}"
    else:
        ending = "ok" if os.WEXITSTATUS(status) == 77 else f"exit{os.WEXITSTATUS(status)}"
    write(request["nonce"], f"{number}.end {ending}")
    if ending != "ok":
        os._exit(1)


def main(request, modules):
    """Load what came along, then the agent's code, then play the runs until one doesn't end well.

    Each run starts from the freshly loaded module: all but the last in a child, the last in this process, because a fork of a process that
    has the standard library loaded costs more than all the calls.
    """
    own = load_own(modules)
    nonce = request["nonce"]
    take_channel()
    limit_cpu(request["load_cpu_s"], lambda: (write(nonce, "broken cpu"), os._exit(1)))
    write(nonce, "ready")
    try:
        function = find_function(request["module"], request["qualname"], request["root"])
    except BaseException as error:
        write(nonce, f"broken {type(error).__name__}")
        os._exit(1)
    write(nonce, "loaded")
    last = len(request["runs"]) - 1
    for number in range(last):
        play_in_child(request, own, function, number)
    limit_cpu(request["cpu_s"], lambda: (write(nonce, f"{last}.end cpu"), os._exit(1)))
    play(request, own, function, last)
    write(nonce, f"{last}.end ok")
    write(nonce, "done")
    os._exit(0)


if __name__ == "__grading__":
    try:
        main(json.loads(REQUEST), MODULES)  # type: ignore[name-defined]  # noqa: F821
    except BaseException:
        # Only before the standard streams are gone does anybody read this: a failure of the machinery.
        os.write(2, traceback.format_exc().encode("utf-8", "replace"))
    os._exit(1)
