"""How a command ends: 0 done, 1 failed, 2 wrong usage or configuration, 130 stopped by Ctrl-C or a termination signal.

One clear message on standard error in every case; a traceback only in a file.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import functools
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec

from strop.core.errors import StropError

P = ParamSpec("P")

_LOGS: contextvars.ContextVar[Path | None] = contextvars.ContextVar("logs", default=None)
_HINT: contextvars.ContextVar[str] = contextvars.ContextVar("hint", default="")


@contextlib.contextmanager
def during(logs: Path, hint: str) -> Iterator[None]:
    """Inside the block, tracebacks go to ``logs``, and ``hint`` says how to go on after Ctrl-C."""
    _LOGS.set(logs)
    _HINT.set(hint)
    yield
    _LOGS.set(None)
    _HINT.set("")


def guarded(command: Callable[P, int | None]) -> Callable[P, None]:
    """Make a command end with an exit code and one message, whatever happens inside it."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        raise SystemExit(_run(command, args, kwargs))

    return wrapper


def _run(command: Callable[..., int | None], args: Any, kwargs: Any) -> int:
    with contextlib.suppress(ValueError):  # only the main thread may set handlers
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = command(*args, **kwargs) or 0
        sys.stdout.flush()
        return code
    except StropError as error:
        _say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        hint = _HINT.get()
        _say("stopped." + (f" {hint}" if hint else ""))
        return 130
    except BrokenPipeError:
        # The reader (head, a pager) has what it wanted; Python's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        _say(f"unexpected error: {type(error).__name__}: {text[0][:300]}\nThis is a fault of strop. The traceback is in {_write(error)}")
        return 1


def _interrupt(_number: int, _frame: Any) -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _write(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error))
    name = f"traceback-{datetime.datetime.now().strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for directory in (_LOGS.get(), Path(tempfile.gettempdir())):
        if directory is None:
            continue
        with contextlib.suppress(OSError):
            path = directory / name
            path.write_text(text, encoding="utf-8")
            return str(path)
    _say(text)
    return "the lines above (no file could be written)"
