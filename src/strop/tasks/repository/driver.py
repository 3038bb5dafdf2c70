"""The program inside the box that runs a repository's tests: a supervisor that holds the result channel, and a child that runs pytest.

Its text is the argument of ``python -c``; it needs the standard library, and pytest from the workspace's ``.venv``. Process 1 forks the
child before it reads the request, so the nonce that begins every line of the channel is never in the memory of a process that runs agent
code. The child asks for each test and gets a fresh token with it; it can say how that one test ended, once, and nothing else. No text of a
test leaves the box: a line holds a number and a letter.
"""

import json
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any

CHANNEL = 100
WORKSPACE = "/workspace"


def write_all(descriptor, data):
    """Write every byte."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def receive(connection, size):
    """Read exactly ``size`` bytes, or ``b""`` at the end."""
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            return b""
        data += chunk
    return data


# ----------------------------------------------------------------------------------------------------------------- supervisor


def supervise(connection, child):
    """Hand out tests, write down how they ended, and see the child off. Never returns."""
    data = b"".join(iter(lambda: os.read(0, 1 << 20), b""))
    os.dup2(1, CHANNEL)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    request = json.loads(data)
    nonce = request.pop("nonce")

    def say(text):
        write_all(CHANNEL, f"{nonce} {text}\n".encode("ascii", "backslashreplace"))

    say("ready")
    body = json.dumps(request).encode()
    ending = "lost"
    try:
        connection.sendall(struct.pack("=I", len(body)) + body)
        ending = talk(connection, os.pidfd_open(child), request, say, time.monotonic() + request["wall_s"])
    except OSError:
        ending = "lost"
    except struct.error:
        ending = "forged"
    if ending != "ok":
        os.kill(child, signal.SIGKILL)
    status = wait_for(child)
    if ending == "lost":
        ending = f"signal{os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit{os.WEXITSTATUS(status)}"
    say(f"end {ending}")
    os._exit(0)


def wait_for(child):
    """Reap whatever ends (this is process 1) until the child has."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return status


def talk(connection, life, request, say, deadline):
    """Serve the child, whose end ``life`` (a pidfd) shows; returns ``"ok"``, ``"timeout"``, ``"forged"``, ``"broken"`` or ``"lost"``.

    The child sends ``L`` (loaded), ``N`` (next, please), ``E`` + token + letter + milliseconds, ``C`` + length + text (what a traced test
    touched), ``B`` (pytest itself broke) or ``D`` (done); anything else is a forgery.
    """
    count, given, token, at, is_loaded = len(request["tests"]), -1, b"", 0, False
    while True:
        left = deadline - time.monotonic()
        ready = select.select([connection, life], [], [], left)[0] if left > 0 else []
        if not ready:
            return "timeout"
        if connection not in ready:
            return "lost"
        kind = receive(connection, 1)
        if not kind:
            return "lost"
        if kind == b"L" and not is_loaded:
            is_loaded = True
            say("loaded")
        elif kind == b"N" and is_loaded and given < 0:
            index = struct.unpack("=I", receive(connection, 4))[0]
            if not at <= index < count:  # tests come in the order asked for; one that wasn't found is passed over
                return "forged"
            given, at, token = index, index + 1, os.urandom(8)
            connection.sendall(token)
        elif kind == b"E" and given >= 0:
            answer = receive(connection, 13)
            if answer[:8] != token or answer[8:9] not in b"pfesxX":
                return "forged"
            say(f"{given} {answer[8:9].decode()} {struct.unpack('=I', answer[9:])[0]}")
            given = -1
        elif kind == b"C" and request["trace"]:
            text = receive(connection, struct.unpack("=I", receive(connection, 4))[0])
            say("trace " + text.decode("ascii", "replace").replace("\n", " "))
        elif kind == b"B":
            return "broken"
        elif kind == b"D" and is_loaded and given < 0:
            return "ok"
        else:
            return "forged"


# ----------------------------------------------------------------------------------------------------------------------- child


def set_path(request):
    """Put the workspace's packages and its ``.venv`` first; no other installed package can be imported."""
    kept = [path for path in sys.path if path not in ("", WORKSPACE) and not path.endswith("-packages")]
    sys.path[:] = [*kept, *request["site"]]


def run_tests(connection):
    """Become pytest over the requested tests. Never returns."""
    request = json.loads(receive(connection, struct.unpack("=I", receive(connection, 4))[0]))
    set_path(request)
    os.chdir(WORKSPACE)
    random.seed(0)
    resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_s"], request["cpu_s"] + 2))
    import pytest

    sys.path[:] = [*(path for path in request["roots"]), *sys.path]
    arguments = [*request["arguments"], *request["files"]]
    if request["collect"]:
        listing = Collect()
        pytest.main(arguments, plugins=[listing])
        connection.sendall(b"L")
        send_text(connection, json.dumps(listing.found))
        connection.sendall(b"D")
    else:
        play = Play(connection, request)
        code = int(pytest.main(arguments, plugins=[play]))
        connection.sendall(b"D" if play.is_loaded and code in (0, 1, 2, 5) else b"B")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def send_text(connection, text):
    """Send a ``C`` message."""
    data = text.encode("ascii", "backslashreplace")
    connection.sendall(b"C" + struct.pack("=I", len(data)) + data)


class Collect:
    """Lists what there is: node ids and files that can't be collected."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {"tests": [], "errors": []}

    def pytest_collectreport(self, report: Any) -> None:
        """Note what can't be collected."""
        if report.failed:
            lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            self.found["errors"].append([report.nodeid, (lines or str(report.longrepr).splitlines())[-1].removeprefix("E").strip()[:300]])

    def pytest_collection_finish(self, session: Any) -> None:
        """Note the tests."""
        self.found["tests"] = [item.nodeid for item in session.items]


class Play:
    """Runs the requested tests in the requested order and reports each to the supervisor."""

    def __init__(self, connection: Any, request: Any) -> None:
        self.connection = connection
        self.request = request
        self.is_loaded = False
        self.index: dict[str, int] = {nodeid: number for number, nodeid in enumerate(request["tests"])}
        self.controls = set(request["controls"])
        self.letters: list[str] = []
        self.token = b""
        self.started = 0.0
        self.tracer = Tracer() if request["trace"] else None

    def pytest_collection_modifyitems(self, session: Any, config: Any, items: list[Any]) -> None:
        """Keep the requested tests, in the requested order, and make the controls."""
        known = {item.nodeid: item for item in items}
        items[:] = [known[nodeid] for nodeid in self.request["tests"] if nodeid in known]
        for item in items:
            if self.index[item.nodeid] in self.controls:
                spoil(item)

    def pytest_collection_finish(self, session: Any) -> None:
        """Say that agent code is loaded."""
        self.is_loaded = True
        self.connection.sendall(b"L")

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        """Ask for the test; the token comes with it."""
        self.connection.sendall(b"N" + struct.pack("=I", self.index[nodeid]))
        self.token = receive(self.connection, 8)
        self.letters = []
        self.started = time.process_time()
        if self.tracer is not None:
            self.tracer.start()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note how a part of the test ended."""
        if report.when == "call":
            is_expected = hasattr(report, "wasxfail")
            letter = {"passed": "X" if is_expected else "p", "failed": "f", "skipped": "x" if is_expected else "s"}[report.outcome]
        elif report.failed:
            letter = "e"
        elif report.skipped:
            letter = "x" if hasattr(report, "wasxfail") else "s"
        else:
            return
        self.letters.append(letter)

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        """Report the test."""
        if self.tracer is not None:
            send_text(self.connection, f"{self.index[nodeid]} {self.tracer.stop()}")
        order = "efXsxp"  # the worst of set-up, call and tear-down counts; subtests report several times
        letter = min(self.letters, key=order.index) if self.letters else "e"
        spent = min(int((time.process_time() - self.started) * 1000), 1 << 30)
        self.connection.sendall(b"E" + self.token + letter.encode() + struct.pack("=I", spent))


def spoil(item):
    """Make a control of a test: it does all that the test does, then fails. Whoever reports it as passed reports anything as passed."""
    original = item.runtest

    def runtest():
        original()
        raise AssertionError("control")

    item.runtest = runtest


class Tracer:
    """Which functions of the workspace a test calls: numbers of code objects, each named when it is first met."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.hit: set[int] = set()
        self.fresh: list[str] = []

    def start(self) -> None:
        """Begin a test."""
        import threading

        self.hit = set()
        self.fresh = []
        threading.settrace(self.call)
        sys.settrace(self.call)

    def stop(self) -> str:
        """End a test; returns what it called, and the names of what is new, as JSON."""
        import threading

        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        return json.dumps([sorted(self.hit), self.fresh])

    def call(self, frame: Any, event: str, argument: Any) -> None:
        """Trace function: note the code object, and trace nothing inside it."""
        code = frame.f_code
        number = self.numbers.get(code)
        if number is None:
            path = code.co_filename
            number = len(self.numbers) if path.startswith(WORKSPACE + "/") and "/.venv/" not in path else -1
            self.numbers[code] = number
            if number >= 0:
                self.fresh.append(f"{number} {code.co_firstlineno} {path[len(WORKSPACE) + 1 :]}")
        if number >= 0:
            self.hit.add(number)


def main():
    """Fork, then supervise or run."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child:
        theirs.close()
        # Agent code runs under the same user: it must be able neither to trace this process nor to read its memory.
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
        supervise(ours, child)
    ours.close()
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.setsid()
    try:
        run_tests(theirs)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    os._exit(3)


if __name__ == "__main__":
    main()
