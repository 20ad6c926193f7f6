"""How the cost of the exchange grows with processes and bytes: `python benchmarks/exchange_cost.py --page`.

Processes that are launched together train a model that is nothing but a vector. The clock runs from the moment at which
all have their gradients to the commit; the slowest process counts. Beside it, in the same processes, Gloo's all-reduce
of the same vector. `host` is one host; `link` is two network namespaces with a link of 1 Gbit/s between them (needs
root). A model is fitted to both, and its prediction for more devices is drawn. `--only host:2` measures one world and
adds it to the file of measurements, so that each call takes a minute at most; `--keep --page` writes their page.
"""

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import page
from exchange_model import CORES, GIGABIT, WAYS, Model, draw
from load import measure_load

WORLDS = ("host:2", "host:4", "host:8", "link:2", "link:4")
MEGABYTES = {"host": (1, 3, 10, 30, 100, 200, 400), "link": (1, 3, 10, 30)}
MAX_MEGABYTES = 10_000  # of all processes: each holds about seven times its vector


def list_sizes(where: str, count: int) -> list[int]:
    """Return the sizes, in MB, that fit into memory in so many processes."""
    return [size for size in MEGABYTES[where] if 7 * size * count <= MAX_MEGABYTES]


def serve(sizes: Sequence[int]) -> None:
    """Be one of the processes; print the seconds of each size, of both ways."""
    import torch
    import torch.distributed as dist

    import lockstep
    from lockstep.processes import launched

    torch.set_num_threads(1)
    seconds: list[float] = []

    class Timed(launched.LaunchedExchange):
        def reduce(self, *args):
            dist.barrier()
            self.began = time.perf_counter()
            return super().reduce(*args)

        def commit(self):
            super().commit()
            seconds.append(time.perf_counter() - self.began)

    class Vector(torch.nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.values = torch.nn.Parameter(torch.zeros(size * 250_000))

        def forward(self, x):
            return x * self.values.sum()

    launched.LaunchedExchange = Timed
    count = int(os.environ["WORLD_SIZE"])
    batch = torch.ones(count, 1), torch.ones(count, 1)
    found = {way: {} for way in WAYS}
    for size in sizes:
        steps = min(20, max(4, 200 // size))
        model = Vector(size)
        loss = torch.nn.L1Loss()
        with lockstep.wrap(model, torch.optim.SGD(model.parameters(), 1e-9), loss, shards=count) as trainer:
            for _ in range(steps + 2):
                trainer.step(batch, verbose=0)
        del model, trainer
        gc.collect()
        found["exchange"][size] = seconds[2:]
        seconds.clear()
        vector = torch.zeros(size * 250_000)
        for _ in range(steps + 2):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(vector)
            seconds.append(time.perf_counter() - began)
        found["all_reduce"][size] = seconds[2:]
        seconds.clear()
    print(json.dumps(found))


@contextmanager
def two_namespaces() -> Iterator[list[str]]:
    """Make two network namespaces with a link of 1 Gbit/s between them."""
    names = [f"exchange{index}-{os.getpid()}" for index in range(2)]
    ends = ["exchange0", "exchange1"]
    for name in names:
        call("ip", "netns", "add", name)
    try:
        call("ip", "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", ends[1], "netns", names[1])
        for index, (name, end) in enumerate(zip(names, ends, strict=True)):
            call("ip", "-n", name, "addr", "add", f"10.77.0.{index + 1}/24", "dev", end)
            for device in ("lo", end):
                call("ip", "-n", name, "link", "set", device, "up")
            limit = ["rate", "1gbit", "burst", "256kb", "latency", "50ms"]
            call("tc", "-n", name, "qdisc", "add", "dev", end, "root", "tbf", *limit)
        yield names
    finally:
        for name in names:
            call("ip", "netns", "delete", name)


def call(*command: str) -> None:
    subprocess.run(command, check=True)


def measure(world: str) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each exchange of a world, by way and size; the slowest process counts."""
    where, _, number = world.partition(":")
    count = int(number)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = [str(size) for size in list_sizes(where, count)]
    if where == "host":
        outputs = launch([[]] * count, count, "127.0.0.1", port, "lo", sizes)
    else:
        with two_namespaces() as names:
            prefixes = [["ip", "netns", "exec", names[index * 2 // count]] for index in range(count)]
            outputs = launch(prefixes, count // 2, "10.77.0.1", port, None, sizes)
    every = [json.loads(output) for output in outputs]
    return {
        way: {size: [max(times) for times in zip(*(one[way][size] for one in every), strict=True)] for size in sizes}
        for way in WAYS
    }


def launch(
    prefixes: Sequence[list[str]], per_host: int, address: str, port: int, interface: str | None, sizes: list[str]
) -> list[str]:
    """Run the processes of a world; return what each prints."""
    shared = {"WORLD_SIZE": len(prefixes), "LOCAL_WORLD_SIZE": per_host, "MASTER_ADDR": address, "MASTER_PORT": port}
    processes = []
    for index, prefix in enumerate(prefixes):
        device = interface or f"exchange{index // per_host}"
        own = {**shared, "RANK": index, "LOCAL_RANK": index % per_host, "GLOO_SOCKET_IFNAME": device}
        environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
        command = [*prefix, sys.executable, __file__, "--serve", *sizes]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("A process failed; its error is above.")
    return outputs


def write_page(results: dict, command: str) -> Path:
    """Write the table, the fit and the plot."""
    models = {(where, way): Model(where, way, results) for where in MEGABYTES for way in WAYS}
    stem = f"{datetime.now(UTC):%Y-%m-%d}-exchange-cost"
    draw(models, page.HERE / f"{stem}.svg")
    measured = [
        [f"{world.replace(':', ', ')} processes", f"{int(size):,}"]
        + [f"{1000 * statistics.median(found[way][size]):,.1f}" for way in WAYS]
        + [f"{1000 * max(found[way][size]):,.1f}" for way in WAYS]
        for world, found in results.items()
        for size in found["exchange"]
    ]
    fitted = [
        [
            f"{WAYS[way]}, {where}",
            f"{1000 * model.terms[0]:.2f}",
            f"{1000 * model.terms[1]:.3f}",
            "–" if model.terms[2] == 0 else f"{1e-6 / model.terms[2]:,.0f}",
            f"{100 * statistics.median(map(abs, model.errors)):.0f}",
            f"{100 * max(map(abs, model.errors)):.0f}",
        ]
        for (where, way), model in models.items()
    ]
    head = [
        "where",
        "MB",
        *(f"{name}, median ms" for name in WAYS.values()),
        *(f"{name}, max" for name in WAYS.values()),
    ]
    fit_head = ["", "start, ms", "per further process, ms", "MB/s", "median error, %", "largest error, %"]
    predicted = [
        [f"{count:,}"]
        + [f"{models['link', way].predict(count, 100e6):,.2f}" for way in WAYS]
        + [f"{models['link', way].predict(count, 100e6, 25 * GIGABIT):,.2f}" for way in WAYS]
        for count in (8, 64, 512, 4096)
    ]
    predicted_head = ["hosts, one process each"]
    predicted_head += [f"{name}, {link}, s" for link in ("1 Gbit/s", "25 Gbit/s") for name in WAYS.values()]
    return page.write(
        "exchange-cost",
        "The cost of the exchange between launched processes",
        command,
        [
            page.table(head, measured),
            "## The model\n\n" + " ".join((Model.__doc__ or "").split()) + "\n\n" + page.table(fit_head, fitted),
            "## The prediction: a model, not a measurement\n\n"
            f"For 100 MB of gradients.\n\n{page.table(predicted_head, predicted)}\n\n![prediction]({stem}.svg)",
        ],
        [
            *(f"Before {world}: {found['load']}" for world, found in results.items()),
            "The clock runs from the moment at which all processes have their gradients (a barrier) to the commit.",
            f"Nothing beyond eight processes on {CORES} cores was run. Worlds whose vectors would take more than "
            f"{MAX_MEGABYTES / 1000:.0f} GB of memory were left out.",
            "The prediction carries the fit of two namespaces on one machine, whose processes share its cores, to many "
            "hosts; 25 Gbit/s is the same fit with the bandwidth term divided by 25. Congestion, stragglers and the "
            "topology of a real network are not in it.",
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=WORLDS, help="measure this world alone")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir(), "exchange-cost.json"))
    parser.add_argument("--page", action="store_true", help="write the page from the measurements")
    parser.add_argument("--keep", action="store_true", help="measure nothing: the file has all worlds")
    asked = parser.parse_args()
    results = json.loads(asked.results.read_text()) if asked.results.exists() and (asked.only or asked.keep) else {}
    for world in () if asked.keep else [asked.only] if asked.only else WORLDS:
        load = str(measure_load())
        results[world] = {"load": load, **measure(world)}
        print(load)
        for way, size in product(WAYS, results[world]["exchange"]):
            times = results[world][way][size]
            print(
                f"{world} {WAYS[way]} {size} MB: {1000 * statistics.median(times):.1f} ms (max {1000 * max(times):.1f})"
            )
    asked.results.write_text(json.dumps(results))
    if asked.page:
        print(write_page(results, ".venv/bin/python benchmarks/exchange_cost.py --page"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve([int(each) for each in sys.argv[2:]])
    else:
        main()
