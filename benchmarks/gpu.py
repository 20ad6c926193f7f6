"""Compare plain loops and Lockstep on one CUDA device: `python benchmarks/gpu.py`. Without one it exits with code 2.

ResNet-18 in float32 and bfloat16: PyTorch's eager loop, and Lockstep with one shard and with eight. If JAX has the
device too, one jitted step against the same two, in float32. Nothing is installed. Every contender keeps its data on
the device, and PyTorch's read the loss of every step, so that a step's time includes its kernels.
"""

import argparse
import importlib
import os
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import chain

import page
from peers import Peer, Turns, Way, serve
from timing import Summary, interleave, time_steps

DEVICE = "cuda:0"
BATCH_SIZES = {"torch": 256, "jax": 64}  # JAX's models and loops are those of jax_step.py
PRECISIONS = {"torch": ("float32", "bf16"), "jax": ("float32",)}
KINDS = {
    "plain": {"torch": "plain eager loop", "jax": "plain `jit`"},
    "1": "Lockstep, 1 shard",
    "8": "Lockstep, 8 shards",
}
HEAD = ["mean ms", "median ms", "p95 ms", "examples/s (mean)", "× plain (mean)"]
NOTES = [
    "Every step is timed on its own: mean, median and p95 (nearest rank) are of steps. × is examples/s as a multiple "
    "of the plain row's, from the means. Above 1 is faster.",
    "In a round each row makes steps for about --seconds, in turn, while the others wait on a pipe; the order is "
    "reversed from round to round. The first tenth of a turn is not counted.",
    "bf16 is autocast in the plain loop and `precision='bf16'` in Lockstep.",
]


def train_with_torch(kind: str, precision: str) -> dict[str, Way]:
    """Return the way to train of one of PyTorch's contenders."""
    import torch
    from models import CASES, data, trained

    case = CASES["resnet18"]
    inputs, targets = (each.to(DEVICE) for each in data(case))
    model, optimizer, criterion = trained(case)

    def batches():
        while True:
            for chosen in torch.randperm(len(inputs), device=DEVICE).split(BATCH_SIZES["torch"]):
                yield inputs[chosen], targets[chosen]

    source = batches()
    if kind == "plain":
        model.to(DEVICE)

        def step() -> float:
            batch, labels = next(source)
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16) if precision == "bf16" else nullcontext():
                loss = criterion(model(batch), labels)
            loss.backward()
            optimizer.step()
            return float(loss.detach())

    else:
        import lockstep

        options = {} if precision == "float32" else {"precision": precision}
        trainer = lockstep.wrap(model, optimizer, criterion, devices=[DEVICE], shards=int(kind), **options)

        def step() -> float:
            return float(trainer.step(next(source), verbose=0)["loss"])

    return {"step": partial(time_steps, step, torch.cuda.synchronize)}


def train_with_jax(kind: str) -> dict[str, Way]:
    """Return the way to train of one of JAX's contenders."""
    import jax_step

    if kind == "plain":
        return jax_step.jitted("resnet18", 1)
    return jax_step.with_lockstep("resnet18", 1, int(kind), [1, int(kind)])


def measure(framework: str, precision: str, rounds: int, seconds: float) -> str:
    """Return the section of one framework in one precision."""
    labels = {kind: label if isinstance(label, str) else label[framework] for kind, label in KINDS.items()}
    with ExitStack() as stack:
        contenders = {}
        for kind, label in labels.items():
            peer = stack.enter_context(Peer(label, [[__file__, "--serve", framework, kind, precision]]))
            peer.ready()
            contenders[label] = Turns(peer, "step")
        turns = interleave(contenders, rounds, seconds)
    summaries = {label: Summary.of(list(chain.from_iterable(each))) for label, each in turns.items()}
    plain, batch_size = summaries[labels["plain"]].mean, BATCH_SIZES[framework]
    rows = [
        [
            label,
            *(f"{value:,.2f}" for value in (one.mean, one.median, one.p95)),
            f"{1000 * batch_size / one.mean:,.0f}",
            f"{plain / one.mean:.2f}",
        ]
        for label, one in summaries.items()
    ]
    raw = page.raw({label: [1000 * sum(turn) / len(turn) for turn in each] for label, each in turns.items()}, 2)
    title = f"## {framework}: ResNet-18, 28×28×1, {precision}, batch {batch_size}"
    return f"{title}\n\n{page.table(['one GPU', *HEAD], rows)}\n\nMean ms of a step by round:\n\n```\n{raw}\n```"


def find_frameworks() -> list[str]:
    """Return the frameworks that have a CUDA device here."""
    installed = [name for name in BATCH_SIZES if find_spec(name)]
    modules = {name: importlib.import_module(f"lockstep.backends.{name}") for name in installed}
    return [name for name, module in modules.items() if DEVICE in module.available()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="each row takes a turn in each")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--page", action="store_true", help="write the dated page")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # several processes share the device
    if asked.serve:
        framework, kind, precision = asked.serve
        serve(train_with_torch(kind, precision) if framework == "torch" else train_with_jax(kind))
        return 0
    frameworks = find_frameworks()
    if not frameworks:
        print("benchmarks/gpu.py needs a CUDA device, and neither PyTorch nor JAX finds one here.", file=sys.stderr)
        return 2
    sections = []
    for framework in frameworks:
        for precision in PRECISIONS[framework]:
            sections.append(measure(framework, precision, asked.rounds, asked.seconds))
            print(f"{sections[-1]}\n", flush=True)
    if asked.page:
        notes = [f"The device is {read_device()}.", *NOTES]
        packages = page.versions(("torch", "jax", "numpy"))
        command = " ".join(["python benchmarks/gpu.py", *sys.argv[1:]])
        print(f"Wrote {page.write('gpu', 'Plain loops and Lockstep on one GPU', command, sections, notes, packages)}")
    return 0


def read_device() -> str:
    """Return the device's name and its driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
