"""How launched processes find each other."""

import socket
import threading

import pytest

from lockstep.errors import LaunchError
from lockstep.exchange.torch_distributed import ProcessGroup
from lockstep.processes import jax_processes
from lockstep.processes.jax_processes import JaxProcesses


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
    monkeypatch.setattr(jax_processes, "describe_host", lambda: names.host)

    def process(index):
        names.host = hosts[index]
        found[index] = JaxProcesses(index, len(hosts), store, "node7:1234").agree_on_address()

    threads = [threading.Thread(target=process, args=(index,)) for index in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (address,) = set(found.values())
    return address


def test_the_processes_of_one_host_meet_on_the_loopback_whatever_the_coordinator_is_called(monkeypatch):
    address, on_one_host = addresses(monkeypatch, ["a", "a", "a"])
    assert address.startswith("127.0.0.1:")
    assert on_one_host


def test_the_processes_of_several_hosts_meet_at_the_coordinator(monkeypatch):
    address, on_one_host = addresses(monkeypatch, ["a", "a", "b"])
    assert address.startswith("node7:")
    assert not on_one_host


def test_a_host_is_the_same_for_all_of_its_processes():
    assert jax_processes.describe_host() == jax_processes.describe_host()


def test_a_port_that_another_process_has_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"cannot listen on port {port} of this host: [^.]+. End the"):
            ProcessGroup.join_on_loopback(port, 0, 2, accelerated=False)
