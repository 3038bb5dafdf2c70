# The made-up tests below are unittest tests on purpose.
# ruff: noqa: PT009, PT027
"""Entry of the warm parent: preload the standard library that test runs use, freeze it, serve.

Arguments: the descriptors of the request and control sockets, and the address of a name server if there is one; or ``--probe`` to print
what works here as JSON and end.
"""

# pyright: reportMissingImports=false

import gc
import signal
import socket
import sys
import types

OWN = sys.path.pop(0)
sys.path_importer_cache.clear()
sys.path.insert(0, OWN)
import furnish  # noqa: E402
import server  # noqa: E402

sys.path.remove(OWN)

PRELOAD = [
    "abc",
    "argparse",
    "array",
    "ast",
    "base64",
    "bisect",
    "calendar",
    "codecs",
    "collections",
    "collections.abc",
    "contextlib",
    "copy",
    "copyreg",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "difflib",
    "dis",
    "enum",
    "errno",
    "fnmatch",
    "fractions",
    "functools",
    "glob",
    "hashlib",
    "heapq",
    "html",
    "html.entities",
    "html.parser",
    "importlib.machinery",
    "importlib.util",
    "inspect",
    "io",
    "itertools",
    "json",
    "keyword",
    "linecache",
    "locale",
    "logging",
    "math",
    "numbers",
    "operator",
    "pathlib",
    "pickle",
    "pkgutil",
    "platform",
    "posixpath",
    "pprint",
    "queue",
    "random",
    "re",
    "reprlib",
    "runpy",
    "secrets",
    "shlex",
    "shutil",
    "signal",
    "stat",
    "statistics",
    "string",
    "stringprep",
    "struct",
    "subprocess",
    "sysconfig",
    "tempfile",
    "textwrap",
    "threading",
    "time",
    "timeit",
    "token",
    "tokenize",
    "traceback",
    "types",
    "typing",
    "unicodedata",
    "unittest",
    "unittest.case",
    "unittest.loader",
    "unittest.main",
    "unittest.mock",
    "unittest.result",
    "unittest.runner",
    "unittest.signals",
    "unittest.suite",
    "unittest.util",
    "urllib.parse",
    "uuid",
    "warnings",
    "weakref",
    "zlib",
    "encodings.ascii",
    "encodings.idna",
    "encodings.latin_1",
]


def preload() -> None:
    """Import the standard modules; one that this interpreter lacks is left out."""
    for name in PRELOAD:
        try:
            __import__(name)
        except ImportError:
            continue


def exercise() -> None:
    """Run made-up tests, so that the forks share compiled regular expressions and the interpreter's own specialisation."""
    import io
    import linecache
    import unittest

    class Sample(unittest.TestCase):
        def test_equal(self) -> None:
            self.assertEqual([1, {"a": 2.0}], [1, {"a": 2.0}])

        def test_different(self) -> None:
            self.assertEqual([1, "b"], [2, "b"])

        def test_text(self) -> None:
            self.assertEqual("one\ntwo", "one\nthree")

        def test_raises(self) -> None:
            with self.assertRaises(ValueError):
                int("x")

        def test_error(self) -> None:
            with self.subTest(part=1):
                raise KeyError("missing")

    module = types.ModuleType("sample")
    module.Sample = Sample  # type: ignore[attr-defined]
    path, real = list(sys.path), (sys.stdout, sys.stderr)
    try:
        for _ in range(16):
            sys.stdout = sys.stderr = io.StringIO()
            # Loaders of its own: the shared default one remembers its first top-level directory.
            unittest.main(module=module, argv=["python -m unittest", "-q"], exit=False, testLoader=unittest.TestLoader())
            unittest.main(module=None, argv=["python -m unittest", "discover", "-s", "/tmp"], exit=False, testLoader=unittest.TestLoader())
            compile("def f(a, *b, c=1):\n    return [x for x in b if x] or {'k': (a, c)}\n", "<sample>", "exec")
    finally:
        sys.stdout, sys.stderr = real
        sys.path[:] = path
        sys.path_importer_cache.pop("/tmp", None)
        linecache.clearcache()


def restore_signals() -> None:
    """What strop was started with (in a shell's background, for example: deaf to an interrupt) is nothing that a run should inherit."""
    for name in ("HUP", "QUIT", "TERM", "CHLD", "TSTP", "TTIN", "TTOU", "ALRM", "USR1", "USR2"):
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


if sys.argv[1] == "--probe":
    server.probe()
else:
    restore_signals()
    furnish.furnish(*sys.argv[3:4])
    preload()
    exercise()
    gc.collect()
    gc.freeze()
    gc.disable()
    server.serve(socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2])))
