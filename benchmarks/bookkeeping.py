"""Where a step on two replicas goes (computing, exchange, update, the rest): `python benchmarks/bookkeeping.py`.

The clock is put around Lockstep's methods from outside. A piece inside another
counts for itself only. The script's own process is timed, for it does all the
input and bookkeeping that others wait for; what a worker does between a message
and its first shard happens beside that and is timed in the worker and added.
`recovery` is what a step pays so that workers may die, be late, join or be slow:
the protocol's decisions, the looks for newcomers, and the choice of the shards.
"""

import argparse
import functools
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import page
import torch
from load import measure_load
from models import CASES, data, trained

import lockstep
from lockstep.backends.torch import shard_pass
from lockstep.backends.torch.backend import TorchBackend
from lockstep.core.lateness import Deadline
from lockstep.data.source import ArraySource
from lockstep.exchange.shared_memory import SharedMemoryExchange
from lockstep.processes import coordinator, local_workers, seats, worker_loop
from lockstep.processes.command_sender import CommandSender
from lockstep.processes.newcomers import Newcomers

STEP = ("compute", "exchange", "update")  # everything else is input and bookkeeping
FOLDER = "BENCH_BOOKKEEPING"
WARM = 2  # steps that are not counted
EPOCH = 50  # steps of an epoch; the data has 64


class Watch:
    """Seconds by label; what runs inside a labelled piece under a label of its own is not counted twice."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._labels: list[str] = []
        self._since = 0.0

    @contextmanager
    def label(self, name: str) -> Iterator[None]:
        self._turn()
        self._labels.append(name)
        try:
            yield
        finally:
            self._turn()
            self._labels.pop()

    def around(self, owner: Any, name: str, label: str) -> None:
        """Times a function or method."""
        inner: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            with self.label(label):
                return inner(*arguments, **keywords)

        setattr(owner, name, timed)

    def through(self, owner: Any, name: str, label: str) -> None:
        """Times a generator, only while it runs."""
        inner: Callable[..., Iterator[Any]] = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*arguments: Any, **keywords: Any) -> Iterator[Any]:
            iterator = inner(*arguments, **keywords)
            end = object()
            while True:
                with self.label(label):
                    value = next(iterator, end)
                if value is end:
                    return
                yield value

        setattr(owner, name, timed)

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._labels:
            self.seconds[self._labels[-1]] += now - self._since
        self._since = now


def watched() -> Watch:
    """A watch around the pieces of a step in this process."""
    watch = Watch()
    watch.around(TorchBackend, "partial_sums", "compute")
    watch.around(shard_pass, "copy_to_device", "input: fresh buffers")
    watch.around(SharedMemoryExchange, "reduce", "exchange")
    watch.around(SharedMemoryExchange, "commit", "exchange")
    watch.around(TorchBackend, "update", "update")
    return watch


def timed_serve(setup: Any, channel: Any) -> None:
    """A worker that also tells what it did before its first shards."""
    watch = watched()
    watch.around(worker_loop.shm, "unpack", "worker: unpack")
    try:
        worker_loop.serve(setup, channel)
    finally:
        Path(os.environ[FOLDER], "worker.json").write_text(json.dumps(watch.seconds))


def measure(model: str, steps: int) -> dict[str, float]:
    """Milliseconds of a step, by piece; `rest` is what no other piece names."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        seats.serve = timed_serve
        watch = watched()
        watch.through(ArraySource, "epoch", "input: gather")
        watch.around(CommandSender, "pack_step", "send to the workers")
        watch.around(CommandSender, "send", "send to the workers")
        for owner, name in (
            (coordinator, "advance"),
            (Newcomers, "update"),
            (Newcomers, "send_proof"),
            (local_workers, "move_shards"),
            (local_workers.Balance, "choose"),
            (local_workers.Balance, "note"),
            (Deadline, "add_step"),
        ):
            watch.around(owner, name, "recovery")
        case = CASES[model]
        images, labels = data(case)
        with lockstep.wrap(*trained(case), devices=2, shards=2, threads=1) as trainer:
            fit = functools.partial(trainer.fit, (images, labels), batch_size=case.batch_size, verbose=0)
            fit(steps_per_epoch=WARM)
            watch.seconds.clear()
            started = time.perf_counter()
            fit(epochs=steps // EPOCH, steps_per_epoch=EPOCH)
            whole = time.perf_counter() - started
        worker = json.loads(Path(folder, "worker.json").read_text())
    pieces = dict(watch.seconds) | {"rest": whole - sum(watch.seconds.values())}
    result = {name: 1000 * seconds / steps for name, seconds in pieces.items()}
    result["worker: unpack"] = 1000 * worker["worker: unpack"] / (steps + WARM)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Show where a step on two replicas goes.")
    parser.add_argument("--model", choices=["lenet", "mlp"], default="lenet")
    parser.add_argument("--steps", type=int, default=100, help=f"rounded up to epochs of {EPOCH}")
    asked = parser.parse_args()
    asked.steps = -(-asked.steps // EPOCH) * EPOCH
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    torch.set_num_threads(1)
    print(f"{measure_load()}\n")
    pieces = measure(asked.model, asked.steps)
    beside = pieces.pop("worker: unpack")
    whole = sum(pieces.values())
    share = 100 * (whole - sum(pieces[piece] for piece in STEP) + beside) / whole
    rows = [[piece, f"{value:.3f}", f"{100 * value / whole:.2f}"] for piece, value in pieces.items()]
    rows.append(["(worker, beside: unpack)", f"{beside:.3f}", f"{100 * beside / whole:.2f}"])
    print(page.table(["piece", "mean ms", "%"], rows))
    print(f"\nAll but {', '.join(STEP)}: {share:.2f} % of a step. Means of {asked.steps} steps.")


if __name__ == "__main__":
    main()
