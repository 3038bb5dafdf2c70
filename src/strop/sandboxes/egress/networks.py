"""The networks of one provider: a gateway per allow-list, made when first asked for."""

from __future__ import annotations

from strop.core.errors import SandboxError
from strop.ports import Egress
from strop.sandboxes.egress.gateway import EgressEvent, Gateway
from strop.sandboxes.egress.namespace import missing_tools
from strop.sandboxes.egress.policy import AllowList

NO_PUBLIC = "it takes address translation or forwarding on the host, which strop never switches on; name the hosts in an allow-list"


class Networks:
    """Gateways by allow-list; see ``egress``."""

    def __init__(self) -> None:
        self._gateways: dict[tuple[str, ...], Gateway] = {}
        self.missing = {"egress_public": NO_PUBLIC}
        """Egress modes that can't be had here, and why, under ``egress_MODE``."""
        if problem := missing_tools():
            self.missing["egress_allowlist"] = problem

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that can be had here."""
        return tuple(mode for mode in ("none", "allowlist", "public") if f"egress_{mode}" not in self.missing)

    def check(self, egress: Egress | None) -> Egress | None:
        """Return ``None`` for no egress, else the request itself.

        Raises:
            SandboxError: It can't be had here, or names something that isn't a host.
        """
        if egress is None or egress.mode == "none":
            return None
        if problem := self.missing.get(f"egress_{egress.mode}"):
            raise SandboxError(f"egress {egress.mode!r} can't be had on this machine: {problem}")
        AllowList(egress.hosts)
        return egress

    async def gateway(self, egress: Egress) -> Gateway:
        """The open gateway for an allow-list."""
        key = tuple(sorted(egress.hosts))
        gateway = self._gateways.get(key)
        if gateway is None:
            gateway = Gateway(AllowList(egress.hosts))
            await gateway.open()
            self._gateways[key] = gateway
        return gateway

    def events(self) -> list[EgressEvent]:
        """The last connections that boxes tried, of every allow-list."""
        return [event for gateway in self._gateways.values() for event in gateway.events]

    async def close(self) -> None:
        """Close every gateway. Idempotent."""
        for gateway in self._gateways.values():
            await gateway.close()
        self._gateways.clear()
