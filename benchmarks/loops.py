"""The training loops that are compared, each in processes of its own.

A loop is started once, makes its warm-up steps, and then waits for orders on its
standard input. While it waits it blocks on a read and uses no core. An order is a
number of steps; the answer is the seconds they took. What a wait has cooled is
warmed up again by a few steps that are not timed.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from models import CASES, Case, data, trained

import lockstep

Steps = Callable[[int], None]


def with_lockstep(case: Case, shards: int | None) -> Steps:
    """Lockstep's own `fit` on two replicas."""
    images, labels = data()
    trainer = lockstep.wrap(*trained(case), devices=2, shards=shards)

    def steps(count: int) -> None:
        trainer.fit((images, labels), batch_size=case.batch_size, steps_per_epoch=count, verbose=0)

    return steps


def with_ddp(case: Case, rank: int, store: str) -> Steps:
    """The loop people write: every rank draws the same order and takes its half of each batch."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model, optimizer, loss = trained(case)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    half = case.batch_size // 2
    return _plainly(case, parallel, optimizer, loss, slice(rank * half, (rank + 1) * half))


def with_one_process(case: Case) -> Steps:
    """The plain loop over whole batches."""
    return _plainly(case, *trained(case), slice(None))


def _plainly(
    case: Case, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: torch.nn.Module, part: slice
) -> Steps:
    images, labels = data()
    generator = torch.Generator().manual_seed(0)

    def steps(count: int) -> None:
        order = torch.randperm(len(images), generator=generator)
        for step in range(count):
            where = order[step * case.batch_size : (step + 1) * case.batch_size][part]
            optimizer.zero_grad()
            loss(model(images[where]), labels[where]).backward()
            optimizer.step()

    return steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["lockstep", "ddp", "plain"])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--shards", type=int)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--store", default="")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    case = CASES[asked.case]
    if asked.kind == "lockstep":
        steps = with_lockstep(case, asked.shards)
    elif asked.kind == "ddp":
        steps = with_ddp(case, asked.rank, asked.store)
    else:
        steps = with_one_process(case)
    steps(case.warmup)
    print("ready", flush=True)
    for order in sys.stdin:
        steps(case.warmup)
        started = time.perf_counter()
        steps(int(order))
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()
