"""Boxes that don't all look alike: host name, path, variables, uptime, latency, test runner and test order, fixed or drawn for each box.

A policy that always trains in the same box learns to know the box. What production shows in many forms should differ in training as well;
what it always shows in one form should be set to that form. ``strop fidelity`` says which is which. A setting is ``KEY=VALUE`` (fixed) or
``KEY`` (drawn); ``sandbox.domain`` of a recipe and the part after the colon of a kind (``bubblewrap:hostname,latency_ms=5``) take the same.

Nothing here weakens a box: all values are set from outside before a command starts, and only agents' boxes are dressed up, never verdicts'.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from strop.core.errors import ConfigError, nearest
from strop.core.random import generator
from strop.ports import Egress, ExecResult, Sandbox, SandboxCapabilities, SandboxProvider, Shell
from strop.sandboxes.wrapped import WrappedBox

_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "juniper", "kestrel", "lotus")
_USERS = ("dev", "ubuntu", "runner", "build", "alex", "sam", "ci", "app")
_RUNNERS = {"quiet": ("-q",), "plain": (), "verbose": ("-v",), "buffered": ("-b", "-q")}
_ORDER_CODE = (
    "import functools,hashlib,sys,unittest\n"
    "k=lambda n:hashlib.sha256((sys.argv[1]+n).encode()).digest()\n"
    "unittest.TestLoader.sortTestMethodsUsing=staticmethod(lambda a,b:(k(a)>k(b))-(k(a)<k(b)))\n"
    "sys.argv=['python -m unittest',*sys.argv[2:]]\n"
    "unittest.main(module=None)"
)
_HOST_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_PATH = re.compile(r"/home(/[A-Za-z0-9_.-]*[A-Za-z0-9_-][A-Za-z0-9_.-]*){1,4}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED, _RESERVED_STARTS = ("PATH", "HOME"), ("LD_", "PYTHON", "STROP_")
MAX_LATENCY_MS = 60_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Domain:
    """How one box looks; the empty one leaves it as the back end makes it.

    Attributes:
        hostname: Name that the box believes to have.
        path: Directory below /home that the workspace is also seen at, and in which commands start.
        variables: Environment variables in addition.
        uptime_s: What /proc/uptime begins with; it then goes on.
        latency_ms: Time added before each command.
        runner: One of ``quiet``, ``plain``, ``verbose``, ``buffered``: how ``python -m unittest discover`` is called.
        order: Key of the order of the test methods in a class; empty leaves it alphabetical.
    """

    hostname: str = ""
    path: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    uptime_s: float = 0.0
    latency_ms: float = 0.0
    runner: str = ""
    order: str = ""


@runtime_checkable
class Disguisable(Protocol):
    """A box that can take another host name, path, variables and uptime for the commands to come."""

    def disguise(self, looks: Mapping[str, Any]) -> None: ...


def _hostname(rng: np.random.Generator) -> str:
    form, word = int(rng.integers(4)), _WORDS[int(rng.integers(len(_WORDS)))]
    if form == 0:
        return "ip-" + "-".join(str(int(part)) for part in (10, *rng.integers(0, 255, 3)))
    if form == 1:
        return f"{int(rng.integers(1 << 48)):012x}"
    return f"{word}-{int(rng.integers(1, 99))}" if form == 2 else word


def _drawers() -> dict[str, Callable[[np.random.Generator], dict[str, Any]]]:
    return {
        "hostname": lambda rng: {"hostname": _hostname(rng)},
        "path": lambda rng: {
            "path": f"/home/{_USERS[int(rng.integers(len(_USERS)))]}/{_WORDS[int(rng.integers(len(_WORDS)))]}{int(rng.integers(100))}"
        },
        "uptime": lambda rng: {"uptime_s": round(float(np.exp(rng.uniform(np.log(60), np.log(90 * 86_400)))), 2)},
        "latency_ms": lambda rng: {"latency_ms": round(float(rng.gamma(1.5, 8.0)), 2)},
        "runner": lambda rng: {"runner": sorted(_RUNNERS)[int(rng.integers(len(_RUNNERS)))]},
        "order": lambda rng: {"order": f"{int(rng.integers(1 << 32)):08x}"},
    }


DRAWN = tuple(_drawers())
KEYS = (*DRAWN, "env.NAME")


def check_settings(settings: Sequence[str]) -> None:
    """Refuse settings that can't be had.

    Raises:
        ConfigError: An unknown key, a value that isn't one, or a key given twice.
    """
    draw_domain(settings, 0)


def draw_domain(settings: Sequence[str], *key: object) -> Domain:
    """Return the looks of one box: fixed values as given, the others drawn from ``key`` alone.

    Example: ``draw_domain(["hostname=ci-7", "latency_ms"], 0, "task")`` has the host name ``ci-7`` and a latency that is always the same.

    Args:
        settings: ``"KEY=VALUE"`` or ``"KEY"``; see the module.
        key: Names the box for the draws.

    Raises:
        ConfigError: As ``check_settings``.
    """
    values: dict[str, Any] = {}
    variables: dict[str, str] = {}
    seen = set()
    for setting in settings:
        name, separator, text = setting.partition("=")
        if "," in setting or not setting.isprintable():
            raise ConfigError(f"domain setting {setting!r:.80} must be printable and without a comma, which divides settings of a kind")
        if name in seen:
            raise ConfigError(f"domain setting {name!r} is given twice")
        seen.add(name)
        if name.startswith("env."):
            variables[_variable(name.removeprefix("env."), setting)] = text
        elif name not in DRAWN:
            raise ConfigError(f"unknown domain setting {setting!r}.{nearest(name, KEYS)}")
        elif separator:
            values.update(_fixed(name, text))
        else:
            values.update(_drawers()[name](generator("domain", name, *key)))
    return Domain(variables=variables, **values)


def _variable(name: str, setting: str) -> str:
    if not _VARIABLE.fullmatch(name) or "=" not in setting or "\0" in setting:
        raise ConfigError(f"domain setting {setting!r} must look like env.NAME=VALUE")
    if name in _RESERVED or name.startswith(_RESERVED_STARTS):
        raise ConfigError(f"domain setting {setting!r}: the sandbox itself sets or refuses {name}")
    return name


def _fixed(name: str, text: str) -> dict[str, Any]:
    if name == "hostname":
        wanted, ok = "a host name in lower case, at most 63 characters", bool(_HOST_NAME.fullmatch(text))
    elif name == "path":
        wanted, ok = "a path below /home of one to four parts", bool(_PATH.fullmatch(text)) and ".." not in text.split("/")
    elif name == "runner":
        wanted, ok = f"one of {', '.join(_RUNNERS)}", text in _RUNNERS
    elif name == "order":
        wanted, ok = "letters and digits", text.isalnum()
    else:
        limit = MAX_LATENCY_MS if name == "latency_ms" else 1e9
        wanted, ok = f"a number from 0 to {limit:g}", bool(re.fullmatch(r"\d{1,10}(\.\d{1,6})?", text)) and float(text) <= limit
        if ok:
            return {"uptime_s" if name == "uptime" else name: float(text)}
    if not ok:
        raise ConfigError(f"domain setting {name}={text!r:.80} must be {wanted}")
    return {name: text}


class VariedProvider:
    """Starts boxes that look as the settings say.

    Args:
        provider: What starts the real boxes.
        settings: As ``draw_domain`` takes them.
        seed: Fixes the draws.
        per_box: False: all boxes over the same base tree look alike, so that a replayed run sees what it saw. True: every box is drawn
            anew, as it is across the tasks of a run; for audits.

    Raises:
        ConfigError: As ``check_settings``.
    """

    def __init__(self, provider: SandboxProvider, settings: Sequence[str], *, seed: int = 0, per_box: bool = False) -> None:
        check_settings(settings)
        self._provider = provider
        self._settings = tuple(settings)
        self._seed = seed
        self._per_box = per_box
        self._started = 0

    @property
    def capabilities(self) -> SandboxCapabilities:
        """Those of the real provider."""
        return self._provider.capabilities

    async def start(self, base: str, *, snapshot: bytes | None = None, egress: Egress | None = None) -> Sandbox:
        """Start a box; see ``ports.SandboxProvider.start``.

        Raises:
            ConfigError: The back end can't change what a setting asks for.
            SandboxError: As the real provider.
        """
        self._started += 1
        box = await self._provider.start(base, snapshot=snapshot, egress=egress)
        try:
            # The listing, not the directory's name: that differs between machines and runs.
            which = self._started if self._per_box else tuple(box.list_files())
            return VariedBox(box, draw_domain(self._settings, self._seed, which))
        except BaseException:
            await box.stop()
            raise

    async def close(self) -> None:
        """Close the real provider."""
        await self._provider.close()


class VariedBox(WrappedBox):
    """A box with the looks of a domain.

    Args:
        box: The real one.
        domain: Its looks.

    Raises:
        ConfigError: The back end can't change what the domain asks for.
    """

    def __init__(self, box: Sandbox, domain: Domain) -> None:
        super().__init__(box)
        self.domain = domain
        self._born_s = time.monotonic()
        self._dress()

    def _dress(self) -> None:
        domain = self.domain
        looks: dict[str, Any] = {"hostname": domain.hostname, "path": domain.path, "variables": dict(domain.variables)}
        looks = {name: value for name, value in looks.items() if value}
        if domain.uptime_s:
            looks["uptime_s"] = domain.uptime_s + time.monotonic() - self._born_s
        if not looks:
            return
        if not isinstance(self._box, Disguisable):
            raise ConfigError(f"boxes of this back end can't change {', '.join(looks)}; only bubblewrap's can")
        self._box.disguise(looks)

    async def _ready(self) -> None:
        if self.domain.uptime_s:
            self._dress()
        if self.domain.latency_ms:
            await asyncio.sleep(self.domain.latency_ms / 1000)

    def _late(self, result: ExecResult) -> ExecResult:
        return replace(result, duration_s=result.duration_s + self.domain.latency_ms / 1000)

    async def exec(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> ExecResult:
        """Run a command; see ``ports.Sandbox.exec``."""
        await self._ready()
        return self._late(await self._box.exec(argv, timeout_s=timeout_s, stdin=stdin))

    async def run_python(self, argv: Sequence[str], *, timeout_s: float) -> ExecResult:
        """Run Python; see ``ports.Sandbox.run_python``. Test runs take the runner and the order of the domain."""
        await self._ready()
        return self._late(await self._box.run_python(variant_of(argv, self.domain), timeout_s=timeout_s))

    async def open_shell(self) -> Shell:
        """Start a shell; latency and uptime don't reach what runs in it."""
        return await self._box.open_shell()

    async def fork(self) -> Sandbox:
        """A new box with the same content and looks."""
        return VariedBox(await self._box.fork(), self.domain)


def variant_of(argv: Sequence[str], domain: Domain) -> list[str]:
    """Return a test run's arguments in the domain's variant; anything else as it is."""
    argv = list(argv)
    if argv[:3] != ["-m", "unittest", "discover"]:
        return argv
    if domain.runner:
        argv = [*argv[:3], *_RUNNERS[domain.runner], *(word for word in argv[3:] if word not in ("-q", "-v", "-b"))]
    return ["-c", _ORDER_CODE, domain.order, *argv[2:]] if domain.order else argv
