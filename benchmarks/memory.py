"""Measure how much memory training takes, as multiples of the model: `python benchmarks/memory.py`, two minutes.

Each way to train runs alone, from the import of its framework to its sixth step, while this process reads the PSS of
all of its processes: pages that several processes share count once. The highest sum is its peak. The model is wide
linear layers and its batch is small, so parameters, gradients, and copies of them are nearly everything.
"""

import argparse
import os
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import page
from peers import Peer, Way, serve

WIDTH = 5000  # a layer has 25 million parameters
BATCH_SIZE = 16
NUM_STEPS = 5  # after the first, in which every contender allocates
PAUSE = 0.005  # seconds between two readings
CONTENDERS = [  # label, the kind of each process started here, shards (0: the default)
    ("plain loop", ["plain"], 0),
    ("DDP (Gloo), 2 processes", ["ddp", "ddp"], 0),
    ("Lockstep, 1 device (1 shard, the default)", ["1"], 0),
    ("Lockstep, 2 devices (2 shards, the default)", ["2"], 0),
    ("Lockstep, 2 devices, 8 shards", ["2"], 8),
]
NOTES = [
    "The peak is the highest sum of the PSS of a contender's processes in `/proc/PID/smaps_rollup`, read every few "
    "milliseconds from its start on. It includes the interpreters and the framework.",
    "`+ momentum` has one array of optimizer state for every parameter.",
    f"A batch has {BATCH_SIZE} examples. DDP (Gloo) and Lockstep on 2 devices run two processes of one thread each; "
    "each computes half of the batch.",
]


def read_pss(pid: int) -> int:
    """Return a process's proportional set size in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def find_descendants(pid: int) -> list[int]:
    """Return the processes that this one and its descendants have started."""
    try:
        children = [each for task in Path(f"/proc/{pid}/task").iterdir() for each in _read_children(task)]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [*children, *(each for child in children for each in find_descendants(child))]


def _read_children(task: Path) -> list[int]:
    try:
        return [int(each) for each in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


class PeakReader:
    """Inside, a thread reads the memory of this process's descendants again and again; `peak` is the highest sum."""

    def __enter__(self) -> "PeakReader":
        self.peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._ended.wait(PAUSE):
            self.peak = max(self.peak, sum(map(read_pss, find_descendants(os.getpid()))))


def train(kind: str, num_layers: int, momentum: float, shards: int | None, rank: int, store: str) -> dict[str, Way]:
    """Return the way to train of one contender."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    inputs, targets = torch.randn(BATCH_SIZE, WIDTH), torch.zeros(BATCH_SIZE, dtype=torch.long)
    criterion = nn.CrossEntropyLoss()
    if kind in ("1", "2"):
        import lockstep

        trainer = lockstep.wrap(model, optimizer, criterion, devices=int(kind), shards=shards)
        return {"step": partial(repeat, lambda: float(trainer.step((inputs, targets), verbose=0)["loss"]))}
    if kind == "ddp":
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        model = nn.parallel.DistributedDataParallel(model)
        inputs, targets = inputs[rank::2], targets[rank::2]

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()

    return {"step": partial(repeat, step)}


def repeat(step, warm: int, count: int) -> list[float]:
    """Make the steps, which nobody times."""
    for _ in range(warm + count):
        step()
    return []


def measure(commands: list[list[str]]) -> int:
    """Return the peak of the contender that these commands start, in bytes."""
    with PeakReader() as reader, Peer(" ".join(commands[0]), [[__file__, *command] for command in commands]) as peer:
        peer.ready()
        peer.ask(f"step 0 {NUM_STEPS}")
    return reader.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8, help="of 25 million parameters each")
    parser.add_argument("--page", action="store_true", help="write the dated page")
    parser.add_argument("--serve", nargs=5, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        kind, momentum, shards, rank, store = asked.serve
        serve(train(kind, asked.layers, float(momentum), int(shards) or None, int(rank), store))
        return
    os.environ.update(GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="")
    model_bytes = 4 * asked.layers * WIDTH * (WIDTH + 1)
    mebibytes = model_bytes / 2**20
    rows = []
    for momentum in (0.0, 0.9):
        for label, kinds, shards in CONTENDERS:
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                store = str(Path(folder, "store"))
                commands = [
                    ["--layers", str(asked.layers), "--serve", kind, str(momentum), str(shards), str(rank), store]
                    for rank, kind in enumerate(kinds)
                ]
                peak = measure(commands) / 2**20
            rows.append([f"{label}{' + momentum' * bool(momentum)}", f"{peak:,.0f}", f"{peak / mebibytes:.2f}"])
            print(*rows[-1], sep="  ", flush=True)
    title = f"Memory of training with {model_bytes // 4:,} parameters"
    table = page.table([f"the model: {mebibytes:,.0f} MiB", "peak MiB", "× the model"], rows)
    print(f"\n{table}")
    if asked.page:
        command = " ".join([".venv/bin/python benchmarks/memory.py", *sys.argv[1:]])
        print(f"Wrote {page.write('memory', title, command, [table], NOTES, page.versions(('torch', 'numpy')))}")


if __name__ == "__main__":
    main()
