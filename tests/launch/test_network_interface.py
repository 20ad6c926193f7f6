"""The network interface that other hosts can reach."""

import socket

import pytest

from lockstep.launch import network_interface
from lockstep.launch.network_interface import find_interface


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "nowhere.invalid", "::1"])
def test_a_host_that_is_this_one_or_unknown_gives_the_default_route(host):
    names = {name for _, name in socket.if_nameindex()} - {"lo"}
    assert find_interface(host) in names | {None}  # None on a machine without a network
    assert find_interface(host) == find_interface("198.51.100.1")


def test_the_interface_has_the_address_from_which_the_host_is_reached(monkeypatch):
    addresses = {"lo": "127.0.0.1", "near": "10.0.0.1", "far": "10.1.0.1"}
    monkeypatch.setattr(network_interface, "_read_address", addresses.get)
    monkeypatch.setattr(socket, "if_nameindex", lambda: enumerate(addresses))

    class Probe:
        def __init__(self, *kind):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def connect(self, address):
            self.own = {"node1": "10.0.0.1", "self": "127.0.1.1"}.get(address[0], "10.1.0.1")

        def getsockname(self):
            return self.own, 1234

    monkeypatch.setattr(socket, "socket", Probe)
    assert [find_interface(host) for host in ("node1", "self", "elsewhere")] == ["near", "far", "far"]
