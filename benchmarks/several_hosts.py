"""Steps over two hosts, Lockstep's beside DDP's: `python benchmarks/several_hosts.py`. Needs root.

Two network namespaces with two processes each stand for two hosts; a pair of veth devices joins them, which tbf limits
to 1 Gbit/s in half of the runs. Both contenders train the same model in the same four processes, in turn; a step lasts
as long as in the slowest process. At the end the parameters are compared with those of one process, bit for bit.
`--only 1M-unlimited` measures one setting and keeps the others' numbers from the file given by `--results`.
"""

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import page
import torch
from timing import Summary
from torch import nn

import lockstep

HERE = Path(__file__).parent
HOSTS = ("lockstep-bench-a", "lockstep-bench-b")
DEVICES = ("lockstep-veth-a", "lockstep-veth-b")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
LIMIT = ("tbf", "rate", "1gbit", "burst", "256kb", "latency", "50ms")
WIDTHS = {"1M": 640, "10M": 2160}  # of the hidden layers
INPUTS, CLASSES, BATCH, COUNT = 256, 10, 128, 4
SETTINGS = [f"{size}-{link}" for link in ("unlimited", "1 Gbit") for size in WIDTHS]
BARS = {"unlimited": 1.2, "1 Gbit": 1.05}


def build_model(size: str) -> nn.Module:
    torch.manual_seed(1)
    width = WIDTHS[size]
    return nn.Sequential(
        nn.Linear(INPUTS, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )


def build_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(BATCH, INPUTS, generator=generator)
    return inputs, torch.randint(CLASSES, (BATCH,), generator=generator)


def open_trainer(size: str) -> Any:
    model = build_model(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return lockstep.wrap(model, optimizer, nn.CrossEntropyLoss(), devices=1, shards=COUNT, threads=1, seed=0)


def open_ddp(size: str, rank: int) -> Callable[[], None]:
    """Return a step of DDP on this rank's quarter of the batch."""
    model = nn.parallel.DistributedDataParallel(build_model(size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs, targets = (array.chunk(COUNT)[rank].clone() for array in build_batch())
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()

    return step


def serve(rank: int, size: str, rounds: int, steps: int) -> None:
    """Be one of the four processes; rank 0 prints what was measured."""
    host = rank // 2
    enter_namespace(HOSTS[host])
    os.environ |= {
        "GLOO_SOCKET_IFNAME": DEVICES[host],
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": "29731",
        "RANK": str(rank),
        "WORLD_SIZE": str(COUNT),
    }
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    batch, trainer = build_batch(), open_trainer(size)
    ways = {"DDP": open_ddp(size, rank), "Lockstep": lambda: trainer.step(batch)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    processor = dict.fromkeys(ways, 0.0)
    for _ in range(rounds):
        for name, step in ways.items():
            began = time.process_time()
            for index in range(steps + 2):
                torch.distributed.barrier()
                before = time.perf_counter()
                step()
                if index >= 2:  # the first find cold caches
                    seconds[name].append(time.perf_counter() - before)
            processor[name] += time.process_time() - began
    slowest = torch.tensor(list(seconds.values()))
    torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
    spent = torch.tensor(list(processor.values())) / (rounds * (steps + 2))
    torch.distributed.all_reduce(spent)
    digest = trainer.digest()
    if rank == 0:
        found = dict(zip(ways, slowest.tolist(), strict=True))
        cpu = dict(zip(ways, spent.tolist(), strict=True))
        print(json.dumps({"seconds": found, "cpu": cpu, "digest": digest, "steps": rounds * (steps + 2)}))
    torch.distributed.barrier()


def train_alone(size: str, steps: int) -> str:
    """Return the digest of one process after so many steps."""
    torch.set_num_threads(1)
    trainer, batch = open_trainer(size), build_batch()
    for _ in range(steps):
        trainer.step(batch)
    return str(trainer.digest())


def enter_namespace(name: str) -> None:
    with Path("/run/netns", name).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


@contextmanager
def connect_hosts(limit: bool) -> Iterator[None]:
    """Create two namespaces that a veth pair joins; inside, they exist."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that they are deleted at a `timeout`, too
    try:
        for name in HOSTS:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", DEVICES[0], "type", "veth", "peer", "name", DEVICES[1])
        for name, device, address in zip(HOSTS, DEVICES, ADDRESSES, strict=True):
            run("ip", "link", "set", device, "netns", name)
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
            for each in ("lo", device):
                run("ip", "-n", name, "link", "set", each, "up")
            if limit:
                run("tc", "-n", name, "qdisc", "add", "dev", device, "root", *LIMIT)
        yield
    finally:
        for name in HOSTS:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()}")


def measure(setting: str, rounds: int, steps: int) -> dict[str, Any]:
    """Return what rank 0 prints of a setting, with whether one process has the same digest."""
    size, link = setting.split("-")
    with connect_hosts(limit=link != "unlimited"):
        command = [sys.executable, __file__, "--size", size, "--rounds", str(rounds), "--steps", str(steps), "--serve"]
        processes = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE if rank == 0 else None, text=True)
            for rank in range(COUNT)
        ]
        try:
            out, _ = processes[0].communicate(timeout=300)
            codes = [process.wait(timeout=60) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if any(codes):
        raise SystemExit(f"The processes of {setting} ended with {codes}.")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    found["equal"] = train_alone(size, found.pop("steps")) == found["digest"]
    return found


def summarize(found: dict[str, Any], setting: str) -> list[str]:
    """Return one row: both medians, their ratio, the bar and whether the digest is that of one process."""
    ours, theirs = (Summary.of(found["seconds"][name]) for name in ("Lockstep", "DDP"))
    ratio, bar = ours.median / theirs.median, BARS[setting.split("-")[1]]
    verdict = page.verdict(ratio, bar + 1e-9, above=False)
    equal = "equal" if found["equal"] else "DIFFERENT"
    cpu = " / ".join(f"{1000 * found['cpu'][name]:.0f}" for name in ("Lockstep", "DDP"))
    return [setting, f"{ours.median:.1f}", f"{theirs.median:.1f}", f"{ratio:.2f}", f"{bar} {verdict}", cpu, equal]


def write_page(results: dict[str, Any]) -> Path:
    head = ["parameters, link", "Lockstep, ms", "DDP, ms", "ratio", "bar", "CPU, ms", "digest of one process"]
    rows = [summarize(results[setting], setting) for setting in SETTINGS if setting in results]
    raw = {
        f"{setting}, {name}": [1000 * each for each in seconds]
        for setting, found in results.items()
        for name, seconds in found["seconds"].items()
    }
    table = "## Median step\n\n" + page.table(head, rows)
    numbers = f"## Every step, ms\n\n```\n{page.raw(raw, 1)}\n```"
    notes = [
        f"Two network namespaces of one host with two processes of one thread each; `tbf {' '.join(LIMIT[1:])}` "
        "limits each direction of the veth pair at 1 Gbit. All four share this host's cores.",
        f"MLPs with {INPUTS} inputs and three hidden layers, batch {BATCH}, one shard per process, SGD with momentum.",
        "CPU: processor time of all threads of the four processes per step, Lockstep's and DDP's, with the barrier's.",
        "Each step begins at a barrier, outside the clock; the slowest process's time counts. The contenders "
        "take turns in the same processes and the same process group.",
    ]
    command = "\n".join(results[setting]["command"] for setting in SETTINGS)
    versions = page.versions(("torch", "numpy"))
    return page.write("several-hosts", "Steps over two hosts", command, [table, numbers], notes, versions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="of each contender in a round")
    parser.add_argument("--only", choices=SETTINGS, action="append")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir(), "lockstep-several-hosts.json"))
    parser.add_argument("--size", choices=list(WIDTHS), help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve is not None:
        return serve(asked.serve, asked.size, asked.rounds, asked.steps)
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        raise SystemExit("This benchmark creates network namespaces: run it as root, with ip and tc (iproute2).")
    results = json.loads(asked.results.read_text()) if asked.only and asked.results.exists() else {}
    for setting in asked.only or SETTINGS:
        options = f"--only '{setting}' --rounds {asked.rounds} --steps {asked.steps}"
        results[setting] = measure(setting, asked.rounds, asked.steps)
        results[setting]["command"] = f"python benchmarks/several_hosts.py {options}"
        print(" | ".join(summarize(results[setting], setting)), flush=True)
        asked.results.write_text(json.dumps(results))
    if set(results) == set(SETTINGS):
        print(write_page(results))


if __name__ == "__main__":
    main()
