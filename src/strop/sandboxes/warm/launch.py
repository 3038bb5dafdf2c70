"""The last step of every run: an isolated process becomes the command. Standard library only."""

# pyright: reportMissingImports=false

import gc
import os
import signal
import sys

import isolate
import pyrun
import syscalls as sc

_OWN_MODULES = ("furnish", "isolate", "keeper", "launch", "server", "syscalls", "pyrun")


def become(kind: str, argv: list[str], status_write: int) -> None:
    """Become Python, or the init of a command, as process 1 of a process namespace. Descriptors 0 to 2 are the run's. Never returns."""
    if kind == "python":
        if pyrun.can_run(argv):
            os.closerange(3, 1 << 20)
            os.setsid()
            _run_python(argv)
        argv = [sys.executable, *argv]
    # A command isn't written to be process 1 (which ignores signals of its own namespace), so this process stays and forks it. Not
    # dumpable: the command has the same user and must not trace this one.
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    child = os.fork()
    if child:
        os.dup2(status_write, 3)
        os.closerange(4, 1 << 20)
        os.closerange(0, 3)
        isolate.supervise(child, 3)
    os.closerange(3, 1 << 20)
    sc.prctl(sc.PR_SET_DUMPABLE, 1)
    os.setsid()
    _run_command(argv)


def _run_python(argv: list[str]) -> None:
    """Become ``python ARGV``. Never returns."""
    for name in _OWN_MODULES:
        sys.modules.pop(name, None)
    gc.enable()
    os._exit(pyrun.run(argv, sys.executable))


def _run_command(argv: list[str]) -> None:
    """Become the command. Never returns."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, other programs expect them
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {os.strerror(error.errno or 0)}\n".encode(errors="replace"))
        os._exit(126 if isinstance(error, PermissionError) else 127)
