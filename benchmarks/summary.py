"""Print README's table of step times, and those of docs/speed.md: `python benchmarks/summary.py`.

They come from the newest page of each framework, which `make bench` writes. A test compares README and docs/speed.md
with what this prints.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import page

HERE = Path(__file__).parent
FRAMEWORKS = {
    "torch": ("PyTorch", "plain loop", "DDP (Gloo)"),
    "jax": ("JAX", "plain `jit`", "`jit` over `NamedSharding`"),
    "tensorflow": ("TensorFlow", "plain `tf.function` or Keras", "`MirroredStrategy`"),
    "mxnet": ("MXNet", "plain gluon loop", "`gluon.Trainer`"),
}
SECTION = re.compile(r"^## (?P<title>.+, batch \d+)$")
LOCKSTEP = ("default arguments", "2 devices")


def newest(name: str) -> Path:
    """Return the latest dated page of a framework."""
    return sorted(HERE.glob(f"????-??-??-{name}.md"))[-1]


def read_rows(text: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return mean, median and p95 of each row, by the model's title and the row's label.

    >>> read_rows("## Net, batch 8\\n\\n| x | mean |\\n| --- | --- |\\n| plain | 1.0 | 0.9 | 1.2 | 8 |\\n")
    {'Net, batch 8': {'plain': ('1.0', '0.9', '1.2')}}
    """
    result: dict[str, dict[str, tuple[str, ...]]] = {}
    rows: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        if section := SECTION.match(line):
            rows = result.setdefault(section["title"], {})
        elif line.startswith("## "):
            rows = {}
        elif line.startswith("|") and len(cells := [cell.strip() for cell in line.strip("|").split("|")]) > 3:
            rows[cells[0]] = tuple(cells[1:4])
    return {
        title: {label: cells for label, cells in rows.items() if _is_number(cells[0])} for title, rows in result.items()
    }


def contenders(rows: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the cells of one model: the faster plain loop, the framework's own way, and Lockstep's four."""
    plain = min((cells for label, cells in rows.items() if label.startswith("plain")), key=_mean)
    own = next(cells for label, cells in rows.items() if not label.startswith(("plain", "Lockstep")))
    found = [plain, own]
    for way in ("`fit`", "`step`"):
        ours = [label for label in rows if label.startswith("Lockstep") and label.endswith(way)]
        found.append(rows[next(label for label in ours if "default arguments" in label)])
        found.append(rows[next(label for label in ours if "2 devices" in label and "(the default)" in label)])
    return [" · ".join(cells) for cells in found]


def summarize(name: str) -> str:
    """Return the table of one framework."""
    title, plain, own = FRAMEWORKS[name]
    path = newest(name)
    head = [f"{title} ([page](../benchmarks/{path.name}))", plain, f"{own}, 2 devices"]
    head += [f"Lockstep, {each}, {way}" for way in ("`fit`", "`step`") for each in LOCKSTEP]
    return page.table(head, [[model, *contenders(rows)] for model, rows in read_rows(path.read_text()).items()])


def summarize_all() -> str:
    """Return one table with the means of all frameworks: a median does not show that a step stalls now and then."""
    head = ["ms of a step, mean", "plain loop", "the framework's own, 2 devices"]
    head += [f"Lockstep, {each}" for each in LOCKSTEP]
    rows = []
    for name, (title, *_) in FRAMEWORKS.items():
        for model, measured in read_rows(newest(name).read_text()).items():
            rows.append([f"{title}: {model}", *(cell.split(" · ")[0] for cell in contenders(measured)[:4])])
    return page.table(head, rows)


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").isdigit()


def _mean(cells: Sequence[str]) -> float:
    return float(cells[0].replace(",", ""))


if __name__ == "__main__":
    print("\n\n".join([summarize_all(), *map(summarize, FRAMEWORKS)]))
