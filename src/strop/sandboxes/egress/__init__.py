"""What a box may reach: a transparent gateway between boxes and the outside, by network namespace and veth pair.

Inside a box nothing points to a proxy: it has an interface, a default route and a name server, as a production machine has. All of them end
in the gateway's own network namespace, where every address is local: a connection to a port of the allow-list is taken by the gateway,
which asks for the name it is meant for (TLS server name, HTTP Host) and connects to that name itself; any other is refused by the kernel,
because nobody listens. No packet is ever forwarded, so an address alone leads nowhere.
"""

from strop.sandboxes.egress.networks import Networks

__all__ = ["Networks"]
