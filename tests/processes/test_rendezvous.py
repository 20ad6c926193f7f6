"""How launched processes find each other."""

import socket
import threading

import pytest

from lockstep.errors import LaunchError
from lockstep.exchange.torch_distributed import open_store
from lockstep.processes import jax_rendezvous
from lockstep.processes.jax_rendezvous import JaxProcesses


class Store(dict):
    """What `jax.distributed` gives its processes in common."""

    def __init__(self):
        super().__init__()
        self.changed = threading.Condition()

    def key_value_set(self, key, value, allow_overwrite):
        assert allow_overwrite  # a second trainer of the same processes meets again
        with self.changed:
            self[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, patience):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self, patience / 1000)
            return self[key]


def addresses(monkeypatch, hosts):
    """What the processes, one on each of these hosts, agree on."""
    store, found = Store(), {}
    names = threading.local()
    monkeypatch.setattr(jax_rendezvous, "describe_host", lambda: names.host)

    def process(index):
        names.host = hosts[index]
        found[index] = JaxProcesses(index, len(hosts), store, "node7:1234").agree_on_place(60)

    threads = [threading.Thread(target=process, args=(index,)) for index in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (address,) = {(place.address, place.port, place.is_on_one_host) for place in found.values()}
    return address


def test_the_processes_of_one_host_meet_on_the_loopback_whatever_the_coordinator_is_called(monkeypatch):
    address, _, on_one_host = addresses(monkeypatch, ["a", "a", "a"])
    assert address == "127.0.0.1"
    assert on_one_host


def test_the_processes_of_several_hosts_meet_at_the_coordinator(monkeypatch):
    address, _, on_one_host = addresses(monkeypatch, ["a", "a", "b"])
    assert address == "node7"
    assert not on_one_host


class Silent:
    """A store in which no other process writes."""

    def key_value_set(self, key, value, allow_overwrite):
        pass

    def blocking_key_value_get(self, key, patience):
        raise RuntimeError(f"DEADLINE_EXCEEDED: {key}\nmore")


def test_a_process_of_jax_that_never_calls_wrap_is_named():
    message = (
        r"Process 0 of 3 has joined jax\.distributed but has not called lockstep\.wrap\. "
        r"Process 2 waited for that up to 7 "
    )
    with pytest.raises(LaunchError, match=message):
        JaxProcesses(2, 3, Silent(), "node7:1234").agree_on_place(7)


def test_a_port_that_another_process_has_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"cannot listen on port {port} of this host: [^.]+. End the"):
            open_store("127.0.0.1", port, listens=True, on_loopback=True)
