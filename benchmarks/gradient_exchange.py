"""Two processes add 44 MB of float32, through shared memory and through Gloo: `python benchmarks/gradient_exchange.py`.

Both ways run in the same two processes on vectors of the same size, in turn. Before each exchange, outside the clock,
both processes write their vectors anew as a backward pass would. The slower process's time counts.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import page
import torch
from load import measure_load
from peers import Peer, Turns, serve
from timing import Summary, interleave
from torch import nn

from lockstep.backends.base import Recipe
from lockstep.backends.torch import open as open_backend
from lockstep.core.options import Options
from lockstep.core.plan import Plan
from lockstep.core.shard_sums import ShardSums
from lockstep.core.types import Work
from lockstep.exchange.barrier import Barrier
from lockstep.exchange.shared_memory import SharedMemoryExchange
from lockstep.launch.shm import Region

NUM_ELEMENTS = 11_000_000
PLAN = Plan.even(2, range(2))
WORK = Work({}, num_examples=2, num_shards=2, threads=1, seed=0, step=0)


class Vector(nn.Module):
    """A model that is nothing but 44 MB of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(NUM_ELEMENTS))


def shared(index: int, descriptors: list[int], bells: list[int]) -> Callable[[], float]:
    """Lockstep's exchange: gradients ready, own half added, commit."""
    model = Vector()
    recipe = Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), (), Options())
    backend = open_backend(recipe, ["cpu:0"])
    memory, control = map(Region, descriptors)
    barrier = Barrier(index, control, bells)
    exchange = SharedMemoryExchange(backend, memory, barrier, PLAN, index)
    layout = backend.layout()
    exchange.open(layout)
    gradient = exchange.get_buffer(index, 0)
    shard_sums = ShardSums(lambda: {index: np.zeros(layout.num_sums)})

    def once() -> float:
        gradient["float32"].fill_(1.0 + index)
        barrier.wait()
        started = time.perf_counter()
        total, _ = exchange.reduce({}, shard_sums, WORK)
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
    """Return the seconds of each exchange, the two ways in turn."""
    regions = [Region.create(name) for name in ("partial-sums", "control")]
    bells = [os.eventfd(0), os.eventfd(0)]
    descriptors = [*(region.descriptor for region in regions), *bells]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        given = [str(Path(folder, "store")), *map(str, descriptors)]
        commands = [[__file__, "--serve", index, *given] for index in "01"]
        with Peer("exchange", commands, tuple(descriptors)) as peer:
            peer.ready()
            contenders = {name: Turns(peer, name) for name in ("shared", "gloo")}
            turns = interleave(contenders, rounds, 0.1, lambda: time.sleep(0.05))
    for region in regions:
        region.close()
    for bell in bells:
        os.close(bell)
    return {name: list(chain.from_iterable(each)) for name, each in turns.items()}


def serve_one(index: int, store: str, descriptors: list[int]) -> None:
    """Be one of the two processes."""
    torch.set_num_threads(1)
    ways = {"shared": shared(index, descriptors[:2], descriptors[2:]), "gloo": gloo(index, store)}
    for once in 3 * list(ways.values()):
        once()

    def repeat(once: Callable[[], float]) -> Callable[[int, int], list[float]]:
        return lambda warm, count: [once() for _ in range(warm + count)][warm:]

    serve({name: repeat(once) for name, once in ways.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    print(f"{measure_load()}\n")
    summaries = {name: Summary.of(seconds) for name, seconds in measure(asked.rounds).items()}
    names = {"shared": "Lockstep, shared memory, with both barriers of a step", "gloo": "Gloo all-reduce"}
    rows = [
        [names[way], *(f"{value:.1f}" for value in (one.mean, one.median, one.p95)), str(one.num_steps)]
        for way, one in summaries.items()
    ]
    print(page.table(["44 MB of float32, 2 processes", "mean ms", "median ms", "p95 ms", "exchanges"], rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve_one(int(sys.argv[2]), sys.argv[3], [int(each) for each in sys.argv[4:]])
    else:
        main()
