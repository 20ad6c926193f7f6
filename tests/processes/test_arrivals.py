"""Launched processes wait for each other: who is missing is named, and what earlier processes left does not count."""

import socket
import threading

import pytest

from lockstep.errors import LaunchError
from lockstep.launch.environment import ProcessPlace
from lockstep.processes.arrivals import Patience, wait_for_address, wait_for_all


class Store(dict):
    """A key-value store of one process, for threads that stand for processes."""

    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]

    def check(self, keys):
        return all(key in self for key in keys)


class Vanished(Store):
    """The store of a process that has ended."""

    def check(self, keys):
        raise RuntimeError("Connection reset by peer\nmore")


def meet(store, count, indexes, seconds=20.0):
    """What these of `count` processes say: the text that they agree on, or the error."""
    found, notices = {}, []

    def process(index):
        try:
            patience = Patience(seconds, notices.append)
            found[index] = wait_for_all(store, index, count, f"host{index}", patience)
        except LaunchError as error:
            found[index] = str(error)

    threads = [threading.Thread(target=process, args=(index,)) for index in indexes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_agree_on_a_text_that_is_new_in_every_launch():
    store = Store()  # torchrun keeps it over restarts
    texts = []
    for count in (3, 3, 2, 4):
        found = meet(store, count, range(count))
        assert len(found) == count
        texts += set(found.values())
    assert len(set(texts)) == 4


@pytest.mark.parametrize("before", [0, 3])
def test_a_process_that_never_comes_is_named_also_if_an_earlier_one_did(before):
    store = Store()
    meet(store, before, range(before))
    found = meet(store, 3, [0, 1], seconds=0.3)
    for text in found.values():
        assert text.startswith("Process 2 of 3 has not come to where the processes meet. Waited 0 seconds. See the")


def test_the_first_process_that_never_comes_is_named():
    found = meet(Store(), 3, [1], seconds=0.1)
    assert found[1].startswith("Process 0 of 3 has not listed this one, process 1. Waited")


def test_a_process_that_came_and_ended_is_named_with_its_host(monkeypatch):
    """It wrote its mark and confirmed the list with two of three; then the third came."""
    store, patience = Store(), Patience(0.3, print)
    first = threading.Thread(target=lambda: meet(store, 3, [0], seconds=20))
    monkeypatch.setattr("lockstep.processes.arrivals.SECONDS_TO_CONFIRM", 0.3)
    first.start()
    with pytest.raises(LaunchError, match="Process 2 of 3 has not come"):
        wait_for_all(store, 1, 3, "node7", patience)
    found = meet(store, 3, [2])
    first.join()
    assert found[2].startswith(
        "Process 1 of 3 has come to where the processes meet (from node7), and ended or hung ther"
    )


def test_a_process_that_comes_after_the_last_look_is_named_with_its_host():
    store = Store()
    first, last = (threading.Thread(target=meet, args=(store, 3, [index], 0.5)) for index in (0, 2))

    class Hasty(Patience):
        def wait(self, is_over, describe, seconds):
            while is_over() or b"host1" not in dict.get(store, "lockstep/list", b""):
                pass
            is_over()  # the last look, at a list without process 2
            last.start()
            while "lockstep/confirmed/2" not in store:
                pass
            raise LaunchError(describe())

    first.start()
    with pytest.raises(LaunchError, match=r"Process(es 0,)? 2 of 3 ha.* \(from (host0, )?host2\)"):
        wait_for_all(store, 1, 3, "host1", Hasty(0.5, print))
    first.join()
    last.join()


def test_worlds_of_different_sizes_are_named():
    store, found = Store(), {}
    other = threading.Thread(target=lambda: found.update(meet(store, 3, [1], seconds=0.5)))
    other.start()
    found |= meet(store, 2, [0], seconds=0.5)
    other.join()
    assert "Process 1 of 2 has not come to where the processes meet. Process 1 was launched as one of 3." in found[0]
    assert "Process 0 of 3 has not listed this one, process 1. Process 0 was launched as one of 2." in found[1]


def test_two_processes_of_one_rank_are_refused():
    store, found = Store(), {}
    doubles = [threading.Thread(target=lambda: found.update(meet(store, 3, [1], 0.5))) for _ in range(2)]
    first = threading.Thread(target=lambda: meet(store, 3, [0], seconds=0.5))
    for thread in (first, *doubles):
        thread.start()
        thread.join(0.1)
    doubles[0].join()
    assert found[1].startswith("Another process came with the same rank as this one, 1 of 3. Give every process a RANK")
    doubles[1].join()
    first.join()


def test_a_store_whose_process_has_ended_is_explained():
    found = meet(Vanished(), 2, [1])
    assert found[1].startswith("Process 0 of 2, at which all processes meet, has ended before all had come.")


def test_a_long_wait_is_announced_before_it_ends():
    now, notices = [0.0], []

    def sleep(seconds):
        now[0] += 1.0

    patience = Patience(100.0, notices.append, " Ask them.", lambda: now[0], sleep)
    with pytest.raises(
        LaunchError, match=r"^Nobody is here\. Waited 100 seconds\. .*, or 0 for no limit\. Ask them\.$"
    ):
        patience.wait(lambda: False, lambda: "Nobody is here.", 100.0)
    assert notices == ["Nobody is here. Waited 10 seconds so far.", "Nobody is here. Waited 40 seconds so far."]


@pytest.mark.parametrize(
    ("host", "reason"), [("127.0.0.1", "Connection refused"), ("nowhere.invalid", "Name or service not known")]
)
def test_an_address_at_which_nobody_listens_is_named(host, reason):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ProcessPlace(1, 2, 1, 2, host, port)
    with pytest.raises(LaunchError) as raised:
        wait_for_address(host, place, False, Patience(0.05, print))
    assert str(raised.value).startswith(
        f"Process 1 of 2 cannot reach process 0, which listens when it calls lockstep.wrap, at {host}:{port} ({reason})"
    )
