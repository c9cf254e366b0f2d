"""The network interface by which this host reaches another, for gloo.

Gloo listens on the address that the host's own name resolves to. On many systems that is 127.0.1.1
(`/etc/hosts` of Debian), which no other host can connect to. The interface that leads to the meeting point is
one that the others can reach, since they come to it too.
"""

import fcntl
import os
import socket
import struct

_SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface."""


def let_gloo_use_the_way_to(host: str) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that leads to `host`, unless it is set or not to be found."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    name = interface_towards(host)
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_towards(host: str) -> str | None:
    """Name of the interface from which IPv4 packets to `host` leave; None where there is none."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing; it only chooses the way.
            probe.connect((host, 9))
            address = probe.getsockname()[0]
            if address.startswith("127."):
                return None
            for _, name in socket.if_nameindex():
                if _address_of(probe, name) == address:
                    return name
    except OSError:
        pass
    return None


def _address_of(probe: socket.socket, interface: str) -> str | None:
    try:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])
