"""Every key of a Harbor ``task.toml`` (schema 1.4, with the legacy keys that it migrates), and what must hold between them.

Source: the PyPI package harbor 0.26.0, ``harbor/models/task/config.py``; ``make test-harbor`` holds these tables against its own schema.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from pathlib import PurePosixPath
from typing import Any

from strop.core.errors import TaskError
from strop.tasks.importers.schema import Field, Nested, Table, boolean, either, integer, list_of, map_of, number, plain, shown, text, wrong

SCHEMA_VERSION = "1.4"
SCHEMA_VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
NETWORK_MODES = ("public", "no-network", "allowlist")
MAIN_SERVICE = "main"

_HOST_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_SECRET = re.compile(r"(KEY|SECRET|TOKEN(?!S)|PASSWORD|CREDENTIAL|AUTH)", re.IGNORECASE)
_NO_DEFAULT = r"\$\{[A-Za-z_][A-Za-z0-9_]*(?::-)?\}"
_CREDENTIAL = re.compile(rf"\s*(?:[A-Za-z]+\s+)?{_NO_DEFAULT}(?:[\s:-]*{_NO_DEFAULT})*\s*")
_STEP_CHARACTERS = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
_DEVICE = re.compile(r"(CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(?:COM|LPT)[1-9\u00b9\u00b2\u00b3])", re.IGNORECASE)
_SERVICE = text(pattern=r"[a-zA-Z0-9][a-zA-Z0-9_.-]*", expected="a Compose service name")
_SIZES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


def host(value: Any, where: str) -> str:
    """Check an entry of an allow-list: host name, leading ``*.``, IP address or network; no URL, port or path."""
    name = text()(value, where).strip().lower().rstrip(".")
    expected = "a host name, '*.' and a host name, an IP address or a network; no URL, port or path"
    try:
        if "/" in name and "%" not in name:
            return ip_network(name).compressed
        if ":" in name and "%" not in name:
            return ip_address(name).compressed
    except ValueError:
        raise wrong(where, value, expected) from None
    tail = name.removeprefix("*.")
    if not all(_HOST_LABEL.fullmatch(label) for label in tail.split(".")):
        raise wrong(where, value, expected)
    if tail != name and re.fullmatch(r"[0-9.]+", tail):
        raise wrong(where, value, "a host name after '*.', not an address")
    return name


def step_name(value: Any, where: str) -> str:
    """Check the name of a step: one directory name that every operating system can have."""
    name = text(empty=False)(value, where)
    stem = name.partition(".")[0].rstrip(" ")
    if not name.strip() or name in (".", "..") or name.endswith((".", " ")) or _STEP_CHARACTERS.search(name) or _DEVICE.fullmatch(stem):
        raise wrong(where, value, "a portable directory name: no separators, control characters or device names")
    if len(name.encode("utf-8")) > 255:
        raise wrong(where, value, "at most 255 bytes")
    return name


def _network(found: Mapping[str, Any], where: str) -> None:
    if found.get("allowed_hosts") and found.get("network_mode") != "allowlist":
        raise TaskError(f"{where}.allowed_hosts is only valid with network_mode = 'allowlist', which is {found.get('network_mode')!r}")


def _phase_network(found: Mapping[str, Any], where: str) -> None:
    if "allowed_hosts" in found and "network_mode" not in found:
        raise TaskError(f"{where}.allowed_hosts is only valid with network_mode = 'allowlist', which is missing")
    _network(found, where)


def _megabytes(value: Any, where: str) -> int:
    size = text()(value, where).strip().upper()
    try:
        return int(float(size[:-1]) * _SIZES[size[-1:]])
    except (KeyError, ValueError, OverflowError):
        raise wrong(where, value, "a size such as '4G', '512M' or '1024K'") from None


def _migrate_environment(data: dict[str, Any], where: str) -> dict[str, Any]:
    for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
        if old in data:
            size = _megabytes(data.pop(old), f"{where}.{old}")
            if data.setdefault(new, size) != size:
                raise TaskError(f"{where}: {old} says {size} MB and {new} says {shown(data[new])}; keep {new}")
    if "allow_internet" in data:
        allowed = boolean(data.pop("allow_internet"), f"{where}.allow_internet")
        if "network_mode" not in data and "allowed_hosts" not in data:
            data["network_mode"] = "public" if allowed else "no-network"
    return data


def _header(name: str, value: Any, where: str) -> str:
    content = text(pattern=r"[^\r\n]*", expected="one line")(value, where)
    if not _HEADER_NAME.fullmatch(name):
        raise TaskError(f"{where}: {shown(name)} is no name of an HTTP header")
    secret = bool(_SECRET.search(name)) or name.lower() in ("cookie", "set-cookie")
    literal = any(default and (secret or _SECRET.search(variable)) for variable, default in _TEMPLATE.findall(content))
    if literal or (secret and content.strip() and not _CREDENTIAL.fullmatch(content)):
        raise TaskError(f"{where} must name its credential as ${{VAR}} without a default, such as 'Bearer ${{TOKEN}}'")
    return content


def _headers(value: Any, where: str) -> dict[str, str]:
    return {name: _header(name, entry, f"{where}.{name}") for name, entry in map_of(plain)(value, where).items()}


def _transport(value: Any, where: str) -> str:
    return "streamable-http" if value == "http" else text(choices=("stdio", "sse", "streamable-http"))(value, where)


def _mcp(found: Mapping[str, Any], where: str) -> None:
    transport = found.get("transport", "sse")
    needed = "command" if transport == "stdio" else "url"
    if not found.get(needed):
        raise TaskError(f"{where}: transport {transport!r} needs the key {needed!r}")
    if transport == "stdio" and found.get("headers"):
        raise TaskError(f"{where}.headers is only valid for HTTP transports, the transport is 'stdio'")


def _source(value: Any, where: str) -> str:
    source = text(empty=False)(value, where)
    if ".." in PurePosixPath(source).parts:
        raise wrong(where, value, "a path without '..'")
    return source


def _destination(value: Any, where: str) -> str:
    path = text()(value, where)
    if not path:
        return path  # the same as none
    parts = PurePosixPath(path).parts
    if "\\" in path or path.startswith("/") or not parts or ".." in parts:
        raise wrong(where, value, "a relative path with forward slashes and without '..'")
    if path.rstrip("/") == "manifest.json":
        raise wrong(where, value, "any other name: the manifest of what was collected has this one")
    return path


def _artifact(found: Mapping[str, Any], where: str) -> None:
    absolute = found["source"].startswith("/") or re.match(r"[A-Za-z]:[/\\]", found["source"])
    if found.get("service", MAIN_SERVICE) != MAIN_SERVICE and not absolute:
        raise TaskError(f"{where}.source is {shown(found['source'])}; from service {found['service']!r} it must be an absolute path")


def _verifier(found: Mapping[str, Any], where: str) -> None:
    if found.get("environment_mode") == "shared" and "environment" in found:
        raise TaskError(f"{where}: environment_mode = 'shared' and an environment table exclude each other")
    _phase_network(found, where)


def _package_name(value: Any, where: str) -> str:
    name = text(pattern=r"[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*", expected="'org/name'")(value, where)
    if ".." in name:
        raise wrong(where, value, "'org/name' without '..'")
    return name


def _root_migrate(data: dict[str, Any], where: str) -> dict[str, Any]:
    version = data.pop("version")
    data.setdefault("schema_version", version)
    return data


def _root(found: Mapping[str, Any], where: str) -> None:
    seen: dict[str, str] = {}
    for step in found.get("steps") or []:
        key = unicodedata.normalize("NFC", step["name"]).casefold()
        if key in seen:
            raise TaskError(f"{where}.steps: {shown(step['name'])} and {shown(seen[key])} are one name where case doesn't count")
        seen[key] = step["name"]


def _os(value: Any, where: str) -> str:
    return text(choices=("linux", "windows"))(value.lower() if isinstance(value, str) else value, where)


_NUMBER = number()
_TEXTS = list_of(text())
_ENV = map_of(text())
_USER = either(text(), integer(), expected="a user's name or number")
_TOPOLOGY = text(pattern=r"\s*[1-9]\d*(x[1-9]\d*)+\s*", expected="dimensions such as '2x4' or '2x2x1'")
_POLICY = {
    "network_mode": Field(check=text(choices=NETWORK_MODES)),
    "allowed_hosts": Field(check=list_of(host)),
}

ARTIFACT = Table(
    name="an artifact",
    fields={
        "source": Field(check=_source, required=True),
        "destination": Field(check=_destination),
        "exclude": Field(check=_TEXTS, default=()),
        "service": Field(check=_SERVICE, default=MAIN_SERVICE),
    },
    verify=_artifact,
)
COLLECT = Table(
    name="[[verifier.collect]]",
    fields={
        "command": Field(check=text(), required=True),
        "service": Field(check=_SERVICE, default=MAIN_SERVICE),
        "timeout_sec": Field(check=_NUMBER, default=60.0),
        "user": Field(check=_USER),
    },
)
HEALTHCHECK = Table(
    name="a healthcheck",
    fields={
        "command": Field(check=text(), required=True),
        "interval_sec": Field(check=_NUMBER, default=5.0),
        "timeout_sec": Field(check=_NUMBER, default=30.0),
        "start_period_sec": Field(check=_NUMBER, default=0.0),
        "start_interval_sec": Field(check=_NUMBER, default=5.0),
        "retries": Field(check=integer(), default=3),
    },
)
MCP_SERVER = Table(
    name="an MCP server",
    fields={
        "name": Field(check=text(), required=True),
        "transport": Field(check=_transport, default="sse"),
        "url": Field(check=text()),
        "command": Field(check=text()),
        "args": Field(check=_TEXTS, default=()),
        "headers": Field(check=_headers),
    },
    verify=_mcp,
)
TPU = Table(
    name="a TPU slice",
    fields={"type": Field(check=text(empty=False), required=True), "topology": Field(check=_TOPOLOGY, required=True)},
)
ENVIRONMENT = Table(
    name="[environment]",
    fields={
        "build_timeout_sec": Field(check=_NUMBER, default=600.0),
        "docker_image": Field(check=text()),
        "os": Field(check=_os, default="linux"),
        "cpus": Field(check=_NUMBER),
        "memory_mb": Field(check=integer()),
        "storage_mb": Field(check=integer()),
        "gpus": Field(check=integer()),
        "gpu_types": Field(check=_TEXTS),
        "tpu": Field(check=Nested(TPU)),
        "mcp_servers": Field(check=Nested(MCP_SERVER, is_list=True), default=()),
        "env": Field(check=_ENV),
        "skills_dir": Field(check=text()),
        "workdir": Field(check=text()),
        "healthcheck": Field(check=Nested(HEALTHCHECK)),
        **_POLICY,
    },
    legacy=("allow_internet", "memory", "storage"),
    migrate=_migrate_environment,
    verify=_network,
)
VERIFIER = Table(
    name="[verifier]",
    fields={
        "timeout_sec": Field(check=_NUMBER, default=600.0),
        "env": Field(check=_ENV),
        "user": Field(check=_USER),
        "environment_mode": Field(check=text(choices=("shared", "separate"))),
        "environment": Field(check=Nested(ENVIRONMENT)),
        "collect": Field(check=Nested(COLLECT, is_list=True), default=()),
        **_POLICY,
    },
    verify=_verifier,
)
AGENT = Table(
    name="[agent]",
    fields={"timeout_sec": Field(check=_NUMBER), "user": Field(check=_USER), **_POLICY},
    verify=_phase_network,
)
AUTHOR = Table(name="an author", fields={"name": Field(check=text(), required=True), "email": Field(check=text())})
PACKAGE = Table(
    name="[task]",
    fields={
        "name": Field(check=_package_name, required=True),
        "version": Field(check=text(empty=False)),
        "description": Field(check=text(), default=""),
        "authors": Field(check=Nested(AUTHOR, is_list=True), default=()),
        "keywords": Field(check=_TEXTS, default=()),
    },
)
STEP = Table(
    name="[[steps]]",
    fields={
        "name": Field(check=step_name, required=True),
        "agent": Field(check=Nested(AGENT)),
        "verifier": Field(check=Nested(VERIFIER)),
        "min_reward": Field(check=either(_NUMBER, map_of(_NUMBER), expected="a number, or a table of numbers")),
        "healthcheck": Field(check=Nested(HEALTHCHECK)),
        "artifacts": Field(check=Nested(ARTIFACT, is_list=True, or_text=True), default=()),
    },
)
TASK = Table(
    name="task.toml",
    fields={
        "schema_version": Field(check=text(choices=SCHEMA_VERSIONS), default=SCHEMA_VERSION),
        "source": Field(check=text()),
        "multi_step_reward_strategy": Field(check=text(choices=("mean", "final"))),
        "artifacts": Field(check=Nested(ARTIFACT, is_list=True, or_text=True), default=()),
        "task": Field(check=Nested(PACKAGE)),
        "metadata": Field(check=map_of(plain)),
        "verifier": Field(check=Nested(VERIFIER)),
        "agent": Field(check=Nested(AGENT)),
        "environment": Field(check=Nested(ENVIRONMENT)),
        "solution": Field(check=Nested(Table(name="[solution]", fields={"env": Field(check=_ENV)}))),
        "steps": Field(check=Nested(STEP, is_list=True)),
    },
    legacy=("version",),
    migrate=_root_migrate,
    verify=_root,
)
