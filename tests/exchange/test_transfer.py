"""The transfer between launched processes, over queues: whoever shares memory, the root has the tree's bytes."""

import queue
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from exchange.test_slices import BACKEND, LAYOUT, add, node
from lockstep.core import tree
from lockstep.core.host_groups import HostGroups
from lockstep.core.plan import Plan
from lockstep.exchange import transfer
from lockstep.exchange.transfer import Buffers, Transfer


class Wires:
    """Queues in place of the connections between processes; counts the elements that each rank sends to others."""

    def __init__(self, count):
        self.count = count
        self.sent = defaultdict(int)
        self._queues = defaultdict(queue.Queue)

    def end(self, index):
        def send(tensor, rank, tag):
            self.sent[index, rank] += len(tensor)
            self._queues[index, rank, tag].put(tensor.clone())
            return SimpleNamespace(wait=lambda: None)

        def receive(tensor, rank, tag):
            return SimpleNamespace(wait=lambda: tensor.copy_(self._queues[rank, index, tag].get(timeout=20)))

        def exchange(received, sent, tag):
            return [receive(*each, tag) for each in received] + [send(*each, tag) for each in sent]

        return SimpleNamespace(index=index, count=self.count, send=send, receive=receive, exchange=exchange)


def exchange(hosts, num_shards, filled, by):
    """The roots of all ranks after two steps, the leaves of the second, and the wires."""
    groups, wires = HostGroups.from_hosts(hosts), Wires(len(hosts))
    plan = Plan.even(num_shards, range(len(hosts)))
    programs = tree.programs(plan, filled)
    slots = [[BACKEND.create_buffer(LAYOUT, None) for _ in range(program.slots)] for program in programs]
    roots = [BACKEND.create_buffer(LAYOUT, None) for _ in groups.groups]
    transfers = [
        Transfer(
            BACKEND,
            wires.end(rank),
            groups,
            plan,
            filled,
            Buffers(LAYOUT, {mate: slots[mate] for mate in groups.get_mates(rank)}, roots[groups.group_of[rank]]),
        )
        for rank in range(len(hosts))
    ]
    for step in range(2):  # the views are made once and serve every step
        leaves = {tree.Span(shard, shard + 1): node(100 * step + shard) for shard in range(filled)}
        for rank, program in enumerate(programs):
            for span, slot in program.spans.items():
                BACKEND.add(tree.total(span, leaves, add), None, slots[rank][slot])
        with ThreadPoolExecutor(len(hosts)) as pool:
            list(pool.map(lambda each: each.run(by), transfers, timeout=60))
    return [roots[groups.group_of[rank]] for rank in range(len(hosts))], leaves, wires


@pytest.mark.parametrize("hosts", ["ab", "aab", "aba", "abc", "aabb", "abab", "aaaa", "aaab", "aabbc"])
@pytest.mark.parametrize(("num_shards", "filled"), [(8, 8), (8, 5), (5, 5), (16, 13)])
def test_every_process_gets_the_bytes_of_the_tree(monkeypatch, hosts, num_shards, filled):
    monkeypatch.setattr(transfer, "BUCKET", 1 << 11)  # several buckets, the last one short
    by = 7.0
    roots, leaves, _ = exchange(hosts, num_shards, filled, by)
    expected = tree.total(tree.root(num_shards), leaves, add)
    for root in roots:
        for dtype, end in LAYOUT.divided.items():
            assert root[dtype][:end].tobytes() == (expected[dtype][:end] / np.asarray(by, dtype)).tobytes()
            assert root[dtype][end:].tobytes() == expected[dtype][end:].tobytes()


@pytest.mark.parametrize(("hosts", "vectors"), [("aabb", 1.0), ("abcd", 1.5), ("aaaa", 0.0), ("aaaabbbb", 1.0)])
def test_a_host_whose_shards_are_a_node_sends_one_vector(hosts, vectors):
    """Of two hosts, half of it in each of the two passes; on average over the hosts, as slices are not quite equal."""
    _, _, wires = exchange(hosts, 8, 8, 1.0)
    between = sum(count for (one, other), count in wires.sent.items() if hosts[one] != hosts[other])
    assert between / len(set(hosts)) == 2 * vectors * sum(LAYOUT.lengths.values())  # of two steps
