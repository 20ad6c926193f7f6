"""Finds the network interface through which this host reaches another.

Gloo listens on the address that the host's name resolves to. On many systems that is a loopback address (/etc/hosts has
`127.0.1.1 name`), at which processes of other hosts cannot reach it. So Lockstep gives Gloo the name of an interface.
"""

import fcntl
import socket
import struct
from contextlib import suppress

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_ELSEWHERE = "198.51.100.1"  # an address that no host has: the default route leads to it


def find_interface(host: str) -> str | None:
    """Returns the interface of the route to `host`, or else of the default route; None for loopback and IPv6.

    No packet is sent: connecting a UDP socket only chooses the socket's own address. If `host` is this host, its name
    may resolve to a loopback address; then the default route is the best guess.
    """
    for other in (host, _ELSEWHERE):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((other, 9))
            own = probe.getsockname()[0]
            if not own.startswith("127."):
                return next((name for _, name in socket.if_nameindex() if _read_address(name) == own), None)
    return None


def _read_address(interface: str) -> str | None:
    """Returns the IPv4 address of an interface, if it has one."""
    request = struct.pack("256s", interface.encode()[:15])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
    return None
