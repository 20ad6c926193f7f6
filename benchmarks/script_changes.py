"""What it costs to find out what a script has changed, in PyTorch: `python benchmarks/script_changes.py`, 10 seconds.

Before a step of a script's own loop on several devices everything that the script may have changed is compared with
saved copies, and after the step the new state is taken for known. Inside a `fit` without code of the script between two
steps neither is done. Only updates write here, so nothing is sent.
"""

import argparse
import time
from collections.abc import Callable

import load
import page
import torch
from torch import nn, optim

from lockstep.backends.torch.replica import Replica
from lockstep.backends.torch.settings import read_switches

WANTED = {"MLP 784-256-256-10": 0.05, "200 modules": 0.3}  # milliseconds a step


def models() -> dict[str, nn.Module]:
    """Return the models by name: the usual MLP, and 100 blocks of two modules with their container."""
    layers = [nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    blocks = [each for _ in range(100) for each in (nn.Linear(64, 64), nn.ReLU())]
    return {"MLP 784-256-256-10": nn.Sequential(*layers), "200 modules": nn.Sequential(*blocks)}


def trained(net: nn.Module) -> Replica:
    """Return a replica whose optimizer has its state, and which has been looked at once."""
    optimizer = optim.Adam(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    replica = Replica(net, optimizer, nn.CrossEntropyLoss(), torch.device("cpu"))
    replica.controls()
    replica.touched()
    return replica


def measure(
    function: Callable[[], object], update: Callable[[], object], rounds: int, calls: int = 10
) -> tuple[float, float]:
    """Return the median and the least of the rounds' mean milliseconds; `update` comes before each call, not timed."""
    times = []
    for _ in range(rounds):
        seconds = 0.0
        for _ in range(calls):
            update()
            began = time.process_time()  # on one thread and without a wait, so that others on the machine count less
            function()
            seconds += time.process_time() - began
        times.append(1000 * seconds / calls)
    return sorted(times)[len(times) // 2], min(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure what it costs to find out what a script has changed.")
    parser.add_argument("--rounds", type=int, default=200, help="of 10 calls each")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(load.measure_load())
    rows = []
    for name, net in models().items():
        replica = trained(net)
        parts = {
            "settings, before a step": replica.controls,
            "of these torch's switches": read_switches,
            "state, before a step": replica.touched,
            "state, after a step": replica.accept_writes,
        }

        def update(net: nn.Module = net, replica: Replica = replica) -> None:
            torch._foreach_add_([parameter.detach() for parameter in net.parameters()], 0.0)  # moves the counters
            replica.accept_writes()

        found = {part: measure(function, update, rounds) for part, function in parts.items()}
        rows += [[name, part, f"{median:.3f}", f"{least:.3f}", ""] for part, (median, least) in found.items()]
        parts.pop("of these torch's switches")
        median, least = (sum(found[part][index] for part in parts) for index in range(2))
        rows.append([name, "a step", f"{median:.3f}", f"{least:.3f}", f"{WANTED[name]:.2f}"])
    print(page.table(["model, Adam, one thread", "what", "median ms", "least ms", "wanted"], rows))


if __name__ == "__main__":
    main()
