"""Two processes add 44 MB of float32, through shared memory and through Gloo, in turn.

Both ways run in the same two processes on vectors of the same size. An order is
`shared` or `gloo`; the answer is the milliseconds of one exchange. Before each,
outside the clock, both write their vectors anew as a backward pass would.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from peers import Peer
from torch import nn

from lockstep.backends.base import STEP, Recipe, Work
from lockstep.backends.torch import open as open_backend
from lockstep.core.options import Options
from lockstep.core.plan import Plan
from lockstep.exchange.barrier import Barrier
from lockstep.exchange.region import Region
from lockstep.exchange.shared import SharedExchange

NUM_ELEMENTS = 11_000_000
PLAN = Plan.even(2, 2)
WORK = Work({}, num_examples=2, num_shards=2, threads=1, seed=0, step=0)


class Vector(nn.Module):
    """A model that is nothing but 44 MB of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(NUM_ELEMENTS))


def shared(index: int, descriptors: list[int], bells: list[int]) -> Callable[[], float]:
    """Lockstep's exchange: leaves ready, own half added, commit."""
    model = Vector()
    recipe = Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), (), Options())
    backend = open_backend(recipe, ["cpu:0"])
    leaves, control = map(Region, descriptors)
    barrier = Barrier(index, control, bells)
    exchange = SharedExchange(backend, leaves, barrier, PLAN, index)
    (leaf,) = exchange.slots(index, 1, backend.layout(STEP))

    def once() -> float:
        leaf["float32"].fill_(1.0 + index)
        leaf["float64"].zero_()
        barrier.wait()
        started = time.perf_counter()
        total, _ = exchange.reduce({}, WORK)
        exchange.commit()
        seconds = time.perf_counter() - started
        assert total["float32"][0] == total["float32"][NUM_ELEMENTS - 1] == 3.0
        barrier.wait()
        return seconds

    return once


def gloo(index: int, store: str) -> Callable[[], float]:
    """Gloo's all-reduce."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=2)
    vector = torch.zeros(NUM_ELEMENTS)

    def once() -> float:
        vector.fill_(1.0 + index)
        torch.distributed.barrier()
        started = time.perf_counter()
        torch.distributed.all_reduce(vector)
        seconds = time.perf_counter() - started
        assert vector[0] == vector[NUM_ELEMENTS - 1] == 3.0
        return seconds

    return once


def measure(rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each exchange, the two ways in turn."""
    regions = [Region.create(name) for name in ("leaves", "control")]
    bells = [os.eventfd(0), os.eventfd(0)]
    descriptors = [*(region.descriptor for region in regions), *bells]
    store = tempfile.mktemp(prefix="bench-store-")
    commands = [["adding.py", str(index), store, *map(str, descriptors)] for index in (0, 1)]
    result: dict[str, list[float]] = {"shared": [], "gloo": []}
    with Peer("exchange", commands, tuple(descriptors)) as peer:
        peer.ready()
        for index in range(rounds):
            for name in sorted(result, reverse=index % 2 == 0):
                result[name].append(1000 * peer.ask(name))
    for region in regions:
        region.close()
    for bell in bells:
        os.close(bell)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("index", type=int)
    parser.add_argument("store")
    parser.add_argument("descriptors", type=int, nargs=4)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ways = {
        "shared": shared(asked.index, asked.descriptors[:2], asked.descriptors[2:]),
        "gloo": gloo(asked.index, asked.store),
    }
    for once in 3 * list(ways.values()):
        once()
    print("ready", flush=True)
    for order in sys.stdin:
        print(ways[order.strip()](), flush=True)


if __name__ == "__main__":
    main()
