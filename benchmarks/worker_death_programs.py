"""The programs that worker_death.py starts: one LeNet in two processes, with Lockstep, DDP and torchft.

Each writes a line to a FIFO for every committed step, with its time and the number of processes that made it, and one
for the process that may be killed. The clock is the same in all processes.
"""

import os
import sys
import time
from pathlib import Path

import torch
from models import CASES, trained
from torch_step import batches

CASE = CASES["lenet"]
FOLDER = Path(os.environ["BENCH_FOLDER"])
FIFO = os.open(FOLDER / "steps", os.O_WRONLY)


def tell_step(num_processes: int) -> None:
    os.write(FIFO, f"step {time.monotonic()} {num_processes}\n".encode())


def tell_victim(pid: int) -> None:
    os.write(FIFO, f"victim {pid}\n".encode())


def train_with_lockstep() -> None:
    import lockstep

    known: list[int] = []
    with lockstep.wrap(*trained(CASE), devices=2) as trainer:
        for batch in batches(CASE):
            trainer.step(batch, verbose=0)
            pids = trainer.session.processes.pids
            tell_step(1 + len(pids))
            if pids and pids != known:
                tell_victim(pids[0])
            known = pids


def train_with_ddp() -> None:
    """Train as torchrun's users do: every start begins with the last checkpoint."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model, optimizer, criterion = trained(CASE)
    path = FOLDER / "checkpoint.pt"
    count = 0
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        count = saved["count"]
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    if rank == 1:
        tell_victim(os.getpid())
    half = CASE.batch_size // 2
    for inputs, targets in batches(CASE, slice(rank * half, (rank + 1) * half)):
        optimizer.zero_grad()
        criterion(ddp(inputs), targets).backward()
        optimizer.step()
        count += 1
        if rank == 0:
            tell_step(2)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "count": count}
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").rename(path)


def train_with_torchft() -> None:
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    group = int(os.environ["REPLICA_GROUP_ID"])
    model, inner, criterion = trained(CASE)

    def get_state():
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load_state(state) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load_state,
        state_dict=get_state,
        min_replica_size=1,
        replica_id=f"group_{group}",
    )
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    if group == 1:
        tell_victim(os.getpid())
    half = CASE.batch_size // 2
    for inputs, targets in batches(CASE, slice(group * half, (group + 1) * half)):
        before = manager.current_step()
        optimizer.zero_grad()
        criterion(ddp(inputs), targets).backward()
        optimizer.step()
        if group == 0 and manager.current_step() > before:
            tell_step(manager.num_participants())


if __name__ == "__main__":
    {"lockstep": train_with_lockstep, "ddp": train_with_ddp, "torchft": train_with_torchft}[sys.argv[1]]()
