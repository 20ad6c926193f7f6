"""Compare PyTorch's plain loop, DDP and Lockstep: `python benchmarks/torch_step.py`, about seven minutes.

The plain loop is the one people write. DDP runs in two processes (Gloo) of one thread each; each rank draws the same
order and takes its half of every batch. Both sum up loss and accuracy as tensors and read them at the end of a turn,
where DDP adds those of its processes up.
"""

import atexit
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

from compare import Entry, Framework, lockstep_entries, main
from models import CASES
from peers import Way, serve
from timing import time_steps
from ways import lockstep_ways, serve_arguments


def entries(name: str) -> list[Entry]:
    """Return the contenders for one model."""
    folder = tempfile.mkdtemp(prefix="bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    store = Path(folder, "store")
    ranks = [["--serve", "ddp", name, "--threads", "1", "--rank", rank, "--store", str(store)] for rank in "01"]
    return [
        Entry("plain loop, default threads", "plain", [["--serve", "plain", name]]),
        Entry("plain loop, 1 thread", "plain", [["--serve", "plain", name, "--threads", "1"]]),
        Entry("DDP (Gloo), 2 processes", "own", ranks),
        *lockstep_entries(name, CASES[name].batch_size),
    ]


def batches(case, rows=slice(None)):
    """Give shuffled batches without end: the chosen rows of each."""
    import torch
    from models import data

    inputs, targets = data(case)
    generator = torch.Generator().manual_seed(0)
    while True:
        for chosen in torch.randperm(len(inputs), generator=generator).split(case.batch_size):
            if len(chosen) == case.batch_size:
                chosen = chosen[rows]
                yield inputs[chosen], targets[chosen]


def plain_loop(case, rank: int | None, store: str) -> dict[str, Way]:
    """Return the loop over whole batches, or with a rank DDP's over its half of them."""
    import torch
    from models import trained
    from torch import distributed

    model, optimizer, criterion = trained(case)
    rows = slice(None)
    if rank is not None:
        distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        model = torch.nn.parallel.DistributedDataParallel(model)
        half = case.batch_size // 2
        rows = slice(rank * half, (rank + 1) * half)
    model.train()
    source = batches(case, rows)
    losses, hits = torch.tensor(0.0), torch.tensor(0)
    num_steps = num_targets = 0

    def step() -> None:
        nonlocal num_steps, num_targets
        inputs, targets = next(source)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        losses.add_(loss.detach())
        hits.add_((outputs.argmax(1) == targets).sum())
        num_steps += 1
        num_targets += targets.numel()

    def finish() -> tuple[float, float]:
        nonlocal num_steps, num_targets
        means = torch.stack([losses / max(num_steps, 1), hits / max(num_targets, 1)])
        if rank is not None:
            distributed.all_reduce(means)
            means /= 2
        losses.zero_()
        hits.zero_()
        num_steps = num_targets = 0
        loss, accuracy = means.tolist()
        return loss, accuracy

    return {"step": partial(time_steps, step, finish)}


def with_lockstep(case, devices: int | None, shards: int | None, expected: list[int]) -> dict[str, Way]:
    """Return the ways to train with Lockstep."""
    from models import data, trained

    import lockstep

    trainer = lockstep.wrap(*trained(case), metrics=["accuracy"], devices=devices, shards=shards)
    return lockstep_ways(trainer, data(case), batches(case), case.batch_size, expected)


def serve_one() -> None:
    """Be a peer."""
    asked = serve_arguments()
    import torch

    if asked.threads:
        torch.set_num_threads(asked.threads)
    case = CASES[asked.model]
    if asked.serve == "lockstep":
        serve(with_lockstep(case, asked.devices, asked.shards, asked.expect))
    else:
        serve(plain_loop(case, asked.rank if asked.serve == "ddp" else None, asked.store))


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve_one()
    else:
        main(
            Framework(
                name="torch",
                title="PyTorch: the plain loop, DDP and Lockstep",
                script=__file__,
                own_way="DDP",
                packages=("torch", "numpy", "cloudpickle"),
                titles={name: case.title for name, case in CASES.items()},
                batch_sizes={name: case.batch_size for name, case in CASES.items()},
                entries=entries,
                default_models=list(CASES),
                default_rounds=12,
            )
        )
