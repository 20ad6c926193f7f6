"""A model of the exchange's cost, fitted to measurements, and the picture of what it predicts."""

import os
import statistics
from itertools import product
from pathlib import Path

import numpy as np

WAYS = {"exchange": "Lockstep", "all_reduce": "Gloo all-reduce"}
GIGABIT = 125e6  # bytes per second
CORES = len(os.sched_getaffinity(0))


class Model:
    """Seconds = start + latency · (N - 1) + V · (N - 1) / N / bandwidth, V in bytes, for N processes.

    On one host with fewer cores than processes each has only its share of a core, so the last term grows with N over
    the number of cores. On a link the processes of a host share it: p of them send p · (N - p) / N · V.
    """

    def __init__(self, where: str, way: str, results: dict) -> None:
        rows, seconds = [], []
        for world, found in results.items():
            if world.startswith(where):
                count = int(world.partition(":")[2])
                for size, times in found[way].items():
                    rows.append(self.describe(where, count, 1e6 * int(size)))
                    seconds.append(statistics.median(times))
        # Relative errors count, so that small and large vectors weigh the same; no term may be negative.
        weights = 1 / np.array(seconds)
        self.terms = fit_positive(np.array(rows) * weights[:, None], np.ones(len(rows)))
        self.errors = [float(row @ self.terms / time - 1) for row, time in zip(np.array(rows), seconds, strict=True)]

    @staticmethod
    def describe(where: str, count: int, size: float) -> tuple[float, float, float]:
        if where == "host":
            return 1.0, count - 1.0, size * (count - 1) / count * max(1.0, count / CORES)
        own = count // 2
        return 1.0, count - 1.0, size * own * (count - own) / count

    def predict(self, count: int, size: float, bandwidth: float | None = None) -> float:
        """Return the seconds with one process per host; the link may be another one than that measured."""
        start, latency, per_byte = self.terms
        if bandwidth is not None:  # of the link that was measured, in its own way of using it
            per_byte *= GIGABIT / bandwidth
        return float(start + latency * (count - 1) + per_byte * size * (count - 1) / count)


def fit_positive(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the least-squares solution without negative terms: of three terms, the best subset decides."""
    best, least = np.zeros(rows.shape[1]), float("inf")
    for used in product((False, True), repeat=rows.shape[1]):
        columns = np.flatnonzero(used)
        if not len(columns):
            continue
        solution = np.linalg.lstsq(rows[:, columns], values, rcond=None)[0]
        error = float(np.sum((rows[:, columns] @ solution - values) ** 2))
        if (solution >= 0).all() and error < least:
            best, least = np.zeros(rows.shape[1]), error
            best[columns] = solution
    return best


def draw(models: dict[tuple[str, str], Model], path: Path) -> None:
    """Draw the prediction for 8 to 4,096 hosts."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    import matplotlib.pyplot as plt

    counts = np.unique(np.logspace(3, 12, 40, base=2).astype(int))
    figure, axes = plt.subplots(figsize=(6, 3.6))
    for link, style in ((1, "-"), (25, "--")):
        for way, color in zip(WAYS, ("C0", "C1"), strict=True):
            seconds = [models["link", way].predict(int(count), 100e6, link * GIGABIT) for count in counts]
            axes.plot(counts, seconds, style, color=color, label=f"{WAYS[way]}, {link} Gbit/s")
    axes.set(xscale="log", yscale="log", xlabel="hosts, one process each", ylabel="seconds for 100 MB")
    axes.set_title("Prediction of the fitted model, not a measurement", fontsize=10)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
