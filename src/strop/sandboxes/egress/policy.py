"""The allow-list: which names and ports may be reached."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from strop.core.errors import SandboxError

DEFAULT_PORTS = (80, 443)
_NAME = re.compile(r"(\*\.)?([a-z0-9_]([a-z0-9_-]*[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?")


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str
    is_suffix: bool
    ports: tuple[int, ...]


class AllowList:
    """Names that may be reached.

    Args:
        hosts: As ``ports.Egress.hosts``.

    Raises:
        SandboxError: An entry isn't a name; addresses can't be allowed, because only names are checked.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._rules = [_parse(host) for host in hosts]

    @property
    def ports(self) -> list[int]:
        """Every port that some name may be reached on."""
        return sorted({port for rule in self._rules for port in rule.ports})

    def allows(self, name: str, port: int | None) -> bool:
        """Whether ``name`` may be reached on ``port`` (on any, when ``None``)."""
        name = normal(name)
        for rule in self._rules:
            is_match = name.endswith(f".{rule.name}") if rule.is_suffix else name == rule.name
            if is_match and (port is None or port in rule.ports):
                return True
        return False


def normal(name: str) -> str:
    """The one spelling of a host name."""
    return name.lower().removesuffix(".")


def _parse(host: str) -> _Rule:
    name, colon, number = host.strip().rpartition(":")
    if not colon:
        name, number = number, ""
    name = normal(name)
    if colon and not (number.isdigit() and 0 < int(number) < 65536):
        raise SandboxError(f"allow-list entry {host!r}: {number!r} isn't a port, expected NAME or NAME:PORT")
    if not _NAME.fullmatch(name) or len(name) > 253 or _is_address(name):
        raise SandboxError(f"allow-list entry {host!r} must be a host name like files.example or *.example, not an address")
    ports = (int(number),) if colon else DEFAULT_PORTS
    return _Rule(name.removeprefix("*."), name.startswith("*."), ports)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.replace(".", "").isdigit()
    return True


def is_reachable_address(address: str) -> bool:
    """Whether an allowed name may stand for this address: never one of this machine, or of its link (where clouds keep credentials)."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    found = mapped or found
    return not (found.is_loopback or found.is_link_local or found.is_multicast or found.is_unspecified)
