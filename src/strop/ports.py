"""The plug-in points. Small protocols; adapters live in their rooms and are named in the registry of ``strop.cli``.

No torch here: weights cross these lines as ``Mapping[str, Any]`` of framework tensors, opaque to the core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from strop.core.episode import Episode, EpisodeKey, Trace
from strop.core.errors import SandboxError, nearest
from strop.core.outcome import Outcome
from strop.core.sample import Batch, Update
from strop.core.task import Task

# --------------------------------------------------------------------------------------------------------- engine


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCapabilities:
    """What an engine can do. A run that needs more than this is refused when it is built."""

    returns_logprobs: bool
    returns_routes: bool
    swaps_in_flight: bool
    is_exact: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Answer to one ``Session.generate`` call.

    Attributes:
        token_ids: ``int32 [n]`` sampled tokens, the stop token included.
        finish_reason: ``"stop"`` or ``"length"``.
    """

    token_ids: np.ndarray
    finish_reason: str


class Session(Protocol):
    """One token stream inside an engine; its key-value cache lives from the first turn to ``close``."""

    async def generate(self, new_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Sequence[int], temperature: float) -> Generation:
        """Feed ``new_ids`` (may be empty), then sample until a stop id or ``max_new_tokens``.

        Temperature 0 is greedy; its recorded log-probabilities are those of temperature 1.

        Raises:
            EngineError: If the stream would not fit the engine's context length; nothing was fed.
        """
        ...

    def feed(self, new_ids: Sequence[int]) -> None:
        """Append tokens that nothing will be sampled after (the last observation), so that the trace holds them."""
        ...

    def trace(self) -> Trace:
        """The stream so far, token-exact. Fed-but-uncomputed tail rows have ``routes.valid = False``."""
        ...

    async def close(self) -> None:
        """Give the cache back. Idempotent."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Generates tokens. Sampling is keyed by ``(seed, episode key, token position)``."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """What it can do."""
        ...

    async def open(self, key: EpisodeKey) -> Session:
        """Start an empty stream; waits (with a deadline) while the engine is full."""
        ...

    async def swap(self, weights: Mapping[str, Any], version: int) -> None:
        """Load ``weights`` between two decode steps; running streams go on, later tokens carry ``version``."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """What it did since the last call, under ``rollout/*`` and ``cost/*`` keys of ``strop.core.metrics``; empty if it doesn't count."""
        ...

    async def close(self) -> None:
        """Stop; open sessions raise ``EngineError``."""
        ...


# --------------------------------------------------------------------------------------------------------- sandbox


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxCapabilities:
    """What a sandbox back end can do on this machine; ``missing`` says why something can't."""

    network_isolation: bool
    memory_limit: bool
    process_limit: bool
    kernel_evidence: bool
    warm_runner: bool
    snapshots: bool
    missing: Mapping[str, str]
    shells: bool = False
    egress: tuple[str, ...] = ("none",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Egress:
    """What a box may reach outside, in Harbor's words.

    Attributes:
        mode: ``"none"`` (nothing), ``"allowlist"`` (only ``hosts``, by name, checked on every connection) or ``"public"`` (everything).
        hosts: Names for ``"allowlist"``: ``"files.example"``, ``"*.example"`` for every name below ``example``, either with ``":PORT"``;
            without one, ports 80 (HTTP) and 443 (TLS).
    """

    mode: str = "none"
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in ("none", "allowlist", "public"):
            raise SandboxError(f"unknown egress mode {self.mode!r}.{nearest(self.mode, ('none', 'allowlist', 'public'))}")
        if bool(self.hosts) != (self.mode == "allowlist"):
            raise SandboxError(f"egress mode {self.mode!r} with hosts {list(self.hosts)}: only 'allowlist' takes hosts, and needs some")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """A finished command.

    Attributes:
        exit_code: Status, or ``None`` if it was killed.
        output: stdout and stderr as they came, capped (first and last 5,000 characters) and decoded with replacement.
        duration_s: Wall seconds.
        killed_by: ``""``, ``"timeout"``, ``"memory"``, ``"processes"``; from kernel evidence only.
        cpu_s: Processor seconds of the main process and of those that it has waited for; 0 where a back end doesn't count them.
    """

    exit_code: int | None
    output: str
    duration_s: float
    killed_by: str = ""
    cpu_s: float = 0.0


BUSY_SHARE = 0.25
"""Processor seconds of a run that a time limit stopped, over the limit, from which on its own work counts as the cause. A run that only
waited may have waited for its turn on a loaded machine."""


def has_worked(cpu_s: float, timeout_s: float) -> bool:
    """Whether a run that a time limit of ``timeout_s`` seconds stopped had used the processor enough to be the cause itself."""
    return cpu_s >= BUSY_SHARE * timeout_s


class Shell(Protocol):
    """A shell that lives on between commands: directory, variables, functions and background processes stay."""

    async def run(self, command: str, *, timeout_s: float) -> ExecResult:
        """Run one command line. Its stdin is empty. Output of background processes comes with the command that runs then.

        A command that outlives ``timeout_s``, or ends the shell, ends the session: everything in it is dead when this returns.

        Raises:
            SandboxError: The session has ended.
        """
        ...

    async def close(self) -> None:
        """Kill everything in the session; its changes stay in the box. Idempotent."""
        ...


class Sandbox(Protocol):
    """One box over a read-only base tree. Changes stay in the box's own layer."""

    async def exec(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> ExecResult:
        """Run a command in the box. A failing command is a result; only a broken box raises ``SandboxError``."""
        ...

    async def run_python(self, argv: Sequence[str], *, timeout_s: float) -> ExecResult:
        """Run ``python argv...`` in the box from the warm runner: the result of ``exec`` without the interpreter's start-up.

        Args:
            argv: ``argv[0]`` is ``-m`` or a script.
            timeout_s: Wall seconds.
        """
        ...

    def read(self, path: str) -> bytes:
        """Content of a regular file, workspace-relative, following no link. ``FileNotFoundError`` if there is none."""
        ...

    def write(self, path: str, content: bytes | None) -> None:
        """Create, replace or (``None``) delete a file, following no link."""
        ...

    def list_files(self) -> list[str]:
        """Sorted workspace-relative paths of regular files."""
        ...

    def changes(self) -> dict[str, bytes | None]:
        """Everything that differs from the base tree; a walk that follows no link and runs nothing of the agent's."""
        ...

    async def open_shell(self) -> Shell:
        """Start a persistent shell in the box; one-shot commands beside it see its files, and it sees theirs.

        Raises:
            SandboxError: A shell is open already, or the back end has none (``capabilities.shells``).
        """
        ...

    async def snapshot(self) -> bytes:
        """The box's file system as it differs from the base, in bytes that ``SandboxProvider.start`` takes. Processes aren't in it.

        Raises:
            SandboxError: A command is running in the box.
        """
        ...

    async def fork(self) -> Sandbox:
        """A new box with the same content; neither ever sees a change of the other."""
        ...

    async def stop(self) -> None:
        """Kill everything inside and remove the layer. Idempotent."""
        ...


class SandboxProvider(Protocol):
    """Starts boxes."""

    @property
    def capabilities(self) -> SandboxCapabilities:
        """What it can do on this machine."""
        ...

    async def start(self, base: str, *, snapshot: bytes | None = None, egress: Egress | None = None) -> Sandbox:
        """Start a box over the directory ``base`` (read only, shared by many boxes).

        Args:
            base: The directory.
            snapshot: Content to begin with, from a box over an equal base, of whatever back end.
            egress: What the box may reach; nothing when ``None``.

        Raises:
            SandboxError: The base or the snapshot can't be used, or the back end lacks the egress mode here.
        """
        ...

    async def close(self) -> None:
        """Stop every box and helper process that this provider started."""
        ...


# --------------------------------------------------------------------------------------------------------- tasks, agent, grading


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolCapabilities:
    """What a pool's tasks need of a run. A run that can't give it is refused when it is built.

    Attributes:
        grader: Name of the grader that decides them, in the registry of graders.
        box_memory_mb: MiB of the boxes that the tasks were admitted in, since smaller ones may fail what is right; 0 if any will do.
    """

    grader: str
    box_memory_mb: int


class TaskPool(Protocol):
    """Where tasks come from, and what their locators mean."""

    @property
    def capabilities(self) -> PoolCapabilities:
        """What its tasks need."""
        ...

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of a split in a fixed order."""
        ...

    def base_dir(self, task: Task) -> str:
        """Directory with the task's starting workspace, read only for everyone."""
        ...


class Renderer(Protocol):
    """Makes prompts and reads actions; the only place that knows a chat format."""

    @property
    def stop_ids(self) -> Sequence[int]:
        """Tokens that end an action."""
        ...

    def render_start(self, task: Task, *, system_prompt: bool) -> list[int]:
        """Tokens from the beginning of the stream up to where the agent's first action begins."""
        ...

    def render_observation(self, text: str) -> list[int]:
        """Tokens after an action (its stop token was already sampled) up to where the next action begins."""
        ...

    def parse(self, token_ids: Sequence[int]) -> tuple[str, dict[str, str], str]:
        """Return ``(call, arguments, text)``; ``call`` is ``""`` for a malformed action."""
        ...


class Grader(Protocol):
    """Turns an episode's changes into an outcome, in a place that the agent can't reach."""

    async def grade(self, task: Task, episode: Episode) -> Outcome:
        """Never raises for anything the agent did; machinery failures come back as ``Failed``."""
        ...

    async def close(self) -> None:
        """Remove what grading left behind. Idempotent."""
        ...


# --------------------------------------------------------------------------------------------------------- training


class Trainer(Protocol):
    """Owns the trained weights and the optimizer."""

    def step(self, batch: Batch) -> Update:
        """One optimizer step.

        Raises:
            NumericsError: If a loss or gradient isn't finite, or a numerics limit is crossed; weights are unchanged.
        """
        ...

    def weights(self) -> Mapping[str, Any]:
        """The current weights under Hugging Face names."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Everything needed to continue bit for bit: weights, optimizer, version."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``."""
        ...


class Tracker(Protocol):
    """Receives metrics. JSON lines come first; others mirror them."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of a step; keys are those of the metrics table."""
        ...

    def close(self) -> None:
        """Write what is still held back. Idempotent."""
        ...


class Launcher(Protocol):
    """Runs the same actors in this process or on a cluster."""

    async def start(self, name: str, target: str, /, **config: Any) -> Any:
        """Start an actor given as ``"module:Class"`` and return a handle with the same methods."""
        ...

    async def stop(self) -> None:
        """Stop every actor that this launcher started. Idempotent."""
        ...
