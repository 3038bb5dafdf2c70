"""Harbor task directories: read, checked, and written again unchanged (comments of ``task.toml`` apart).

Source: the PyPI package harbor 0.26.0, ``harbor/models/task``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from strop.core.errors import TaskError
from strop.tasks.importers import atif
from strop.tasks.importers.harbor_tables import AGENT, COLLECT, ENVIRONMENT, STEP, TASK, VERIFIER
from strop.tasks.importers.hostile import File, as_text, parse_json
from strop.tasks.importers.record import (
    LIMITS,
    Blueprint,
    Collect,
    Gold,
    ImportedTask,
    Network,
    Place,
    StepPlan,
    VerifierPlan,
    make_task,
    strip_canary,
)
from strop.tasks.importers.toml_text import dump_toml

FORMAT = "harbor"
CONFIG = "task.toml"
INSTRUCTION = "instruction.md"
TRAJECTORY = "trajectory.json"
IGNORE = ".harborignore"
BUILD_FILES = ("Dockerfile", "docker-compose.yaml")
_SUFFIX = {"linux": ".sh", "windows": ".bat"}


def read_config(data: bytes, where: str) -> dict[str, Any]:
    """Return a ``task.toml``, checked, with legacy keys in their present spelling.

    Raises:
        TaskError: It isn't TOML, or breaks a rule of the schema.
    """
    try:
        parsed = tomllib.loads(data.decode("utf-8"))
    except RecursionError:
        raise TaskError(f"{where} is nested too deeply") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TaskError(f"{where} is not TOML: {error}") from None
    return TASK.read(parsed, where)


def import_task(files: Mapping[str, File], folder: str, *, split: str = "train") -> ImportedTask:
    """Return the task of a Harbor directory.

    Args:
        files: Its files by relative path, from ``hostile.read_folder`` or ``read_archive``.
        folder: Name of the directory; the task's name where ``task.toml`` gives none.
        split: Where the task goes.

    Raises:
        TaskError: A key is unknown or wrong, or a file is missing; the message names it.
    """
    what = f"Harbor task {folder!r}"
    if CONFIG not in files:
        raise TaskError(f"{what} has no {CONFIG}")
    config = read_config(files[CONFIG].data, f"{what}, {CONFIG}")
    name = config.get("task", {}).get("name", folder)
    others = {path: file for path, file in files.items() if path != CONFIG}
    for path in others:
        _check_file(path, others[path], what)
    plan = _plan(config, others, what)
    first = plan.steps[0]
    task = make_task(
        FORMAT,
        name,
        first.instruction,
        split=split,
        limits=LIMITS if first.agent_timeout_s is None else replace(LIMITS, wall_s=float(first.agent_timeout_s)),
        source=config.get("source") or "",
        version=config.get("task", {}).get("version", ""),
        steps=str(len(plan.steps)) if len(plan.steps) > 1 else "",
        cluster=name,
    )
    return ImportedTask(format=FORMAT, name=name, fields=config, files=others, task=task)


def export_files(task: ImportedTask) -> dict[str, File]:
    """Return the directory of an imported Harbor task."""
    return {CONFIG: File(dump_toml(task.fields).encode()), **task.files}


def blueprint(task: ImportedTask) -> Blueprint:
    """Return what a runner needs to know about an imported Harbor task."""
    return _plan(task.fields, task.files, f"Harbor task {task.name!r}")


def _check_file(path: str, file: File, what: str) -> None:
    parts = path.split("/")
    if parts[-1] == IGNORE:
        scope = parts[2:3] if parts[0] == "steps" else parts[:1]
        if scope not in (["tests"], ["solution"]):
            raise TaskError(f"{what}: {path} has no effect there; {IGNORE} belongs into tests/ or solution/")
    if path == TRAJECTORY or (parts[0] == "steps" and len(parts) == 3 and parts[2] == TRAJECTORY):
        atif.read_trajectory(parse_json(file.data, f"{what}, {path}"), f"{what}, {path}")


def _plan(config: Mapping[str, Any], files: Mapping[str, File], what: str) -> Blueprint:
    environment = config.get("environment", {})
    if not environment.get("docker_image") and not _has_folder(files, "environment"):
        raise TaskError(f"{what} has neither a folder environment/ nor the key environment.docker_image")
    steps = config.get("steps") or [{}]
    plans = tuple(_step(config, step, files, what) for step in steps)
    solution = _script(files, "solution/solve", environment.get("os", "linux"))
    gold = Gold(kind="script", value=solution, env=dict(config.get("solution", {}).get("env", {}))) if solution else Gold()
    return Blueprint(
        place=_place(environment, files, "environment"),
        steps=plans,
        gold=gold,
        reward_strategy=config.get("multi_step_reward_strategy", "mean"),
    )


def _step(config: Mapping[str, Any], step: Mapping[str, Any], files: Mapping[str, File], what: str) -> StepPlan:
    prefix = f"steps/{step['name']}/" if step else ""
    path = prefix + INSTRUCTION
    if path not in files:
        raise TaskError(f"{what} has no {path}")
    instruction = strip_canary(as_text(files[path], f"{what}, {path}"))
    agent = _merged(config.get("agent", {}), step.get("agent", {}))
    artifacts = [*config.get("artifacts", []), *step.get("artifacts", [])]
    return StepPlan(
        name=step.get("name", ""),
        instruction=instruction,
        verifier=_verifier(config, step, files, what),
        agent_timeout_s=AGENT.get(agent, "timeout_sec"),
        agent_user=agent.get("user"),
        agent_network=_network(agent),
        min_reward=STEP.get(step, "min_reward") if step else None,
        healthcheck=step.get("healthcheck"),
        artifacts=tuple({"source": item} if isinstance(item, str) else item for item in artifacts),
        setup=f"{prefix}workdir/setup.sh" if prefix and f"{prefix}workdir/setup.sh" in files else "",
        history=prefix + TRAJECTORY if prefix + TRAJECTORY in files else "",
    )


def _merged(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A step's table over the task's; a step with a network policy of its own takes no hosts from the task's."""
    base = {key: value for key, value in shared.items() if key != "allowed_hosts" or "network_mode" not in own}
    return {**base, **own}


def _mode(verifier: Mapping[str, Any]) -> str | None:
    return verifier.get("environment_mode") or ("separate" if "environment" in verifier else None)


def _verifier(config: Mapping[str, Any], step: Mapping[str, Any], files: Mapping[str, File], what: str) -> VerifierPlan:
    environment = config.get("environment", {})
    shared, own = config.get("verifier", {}), step.get("verifier", {})
    merged = _merged(shared, own)
    is_separate = (_mode(own) or _mode(shared) or "shared") == "separate"
    own_tests = f"steps/{step['name']}/tests" if step else "tests"
    place, brings_tests, os_name = None, False, environment.get("os", "linux")
    if is_separate:
        place, brings_tests = _separate(((own, own_tests), (shared, "tests")), environment, files)
        os_name = place.os
    script = _script(files, f"{own_tests}/test", os_name) or _script(files, "tests/test", os_name)
    if not script and not brings_tests:
        raise TaskError(f"{what} has no {own_tests}/test{_SUFFIX[os_name]}, which {os_name} tasks need")
    return VerifierPlan(
        is_separate=is_separate,
        place=place,
        script="" if brings_tests else script,
        timeout_s=VERIFIER.get(merged, "timeout_sec"),
        env={**shared.get("env", {}), **own.get("env", {})},
        user=merged.get("user"),
        network=_network(merged),
        collect=tuple(
            Collect(
                command=hook["command"],
                service=COLLECT.get(hook, "service"),
                timeout_s=COLLECT.get(hook, "timeout_sec"),
                user=hook.get("user"),
            )
            for hook in merged.get("collect", [])
        ),
    )


def _separate(
    candidates: tuple[tuple[Mapping[str, Any], str], ...], environment: Mapping[str, Any], files: Mapping[str, File]
) -> tuple[Place, bool]:
    """The verifier's own place, and whether its image holds the tests: its image, else a build in tests/, else a copy of the agent's."""
    settings = next((verifier["environment"] for verifier, _ in candidates if "environment" in verifier), environment)
    for verifier, folder in candidates:
        if image := verifier.get("environment", {}).get("docker_image"):
            return _place({**settings, "docker_image": image}, files, ""), True
        if any(f"{folder}/{name}" in files for name in BUILD_FILES):
            return _place({key: value for key, value in settings.items() if key != "docker_image"}, files, folder), True
    copy = {**settings, "os": settings.get("os", environment.get("os", "linux"))}
    copy.pop("docker_image", None)
    if image := environment.get("docker_image"):
        copy["docker_image"] = image
    return _place(copy, files, "environment"), False


def _place(settings: Mapping[str, Any], files: Mapping[str, File], folder: str) -> Place:
    rest = {key: value for key, value in settings.items() if key not in ("docker_image", "workdir", "os", "network_mode", "allowed_hosts")}
    if folder and f"{folder}/docker-compose.yaml" in files:
        rest["compose"] = f"{folder}/docker-compose.yaml"
    image = settings.get("docker_image") or ""
    return Place(
        image=image,
        build="" if image and f"{folder}/Dockerfile" not in files else folder,
        workdir=settings.get("workdir") or "",
        os=ENVIRONMENT.get(settings, "os"),
        network=_network(settings) or Network(),
        settings=rest,
    )


def _network(data: Mapping[str, Any]) -> Network | None:
    mode = data.get("network_mode")
    return None if mode is None else Network(mode=mode, hosts=tuple(data.get("allowed_hosts") or ()))


def _script(files: Mapping[str, File], stem: str, os_name: str) -> str:
    path = stem + _SUFFIX[os_name]
    return path if path in files else ""


def _has_folder(files: Mapping[str, File], folder: str) -> bool:
    return any(path.startswith(f"{folder}/") for path in files)
