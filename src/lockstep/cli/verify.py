"""`lockstep verify`: the same steps on several numbers of devices, and the digest after each."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.cli import devices, scripts, target
from lockstep.datasets import digits
from lockstep.errors import ModelError
from lockstep.trainer import Trainer

DIGEST_CHARACTERS = 16
LEAST_CHARACTERS = 8
BATCH_SIZE = 256


@dataclass(frozen=True)
class Question:
    """What is to be compared. Shards and batch size that are None are the trainer's own."""

    counts: tuple[int, ...]
    steps: int
    shards: int | None = None
    batch_size: int | None = None


def show(console: Console, question: Question, script: str | None) -> None:
    """Prints a table of digests; raises DivergedError, which names step and tensor, where two differ."""
    trainer, data = _built_in(question) if script is None else _users_own(script)
    counts = _listed(question.counts)
    with trainer, console.status(f"{question.steps} steps on {counts} devices"):
        # A loader has its own batches; arrays are cut into batches of this size.
        batches = list(islice(trainer._source(data, question.batch_size, shuffle=True).epoch(0), question.steps))
        result = trainer.verify(batches, steps=question.steps, devices=question.counts)
    console.print(_table(result.digests, console.width))
    verdict = f"  The same bits after every one of {len(batches)} steps on {counts} devices."
    console.print(Text(verdict, style="bold green"))


def _built_in(question: Question) -> tuple[Trainer, Any]:
    """The network that ships with the package, on accelerators where there are enough, else on the CPU."""
    devices.require("torch")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "verify.py")
        path.write_text(scripts.VERIFY, encoding="utf-8")
        make = target.load(f"{path}:make_trainer")
    enough = len(devices.available("torch")) >= max(question.counts)
    trainer, (x, y) = make(devices=1 if enough else ["cpu"], shards=question.shards)
    size = question.batch_size or BATCH_SIZE
    return trainer, [(x[start : start + size], y[start : start + size]) for start in range(0, len(x), size)]


def _users_own(script: str) -> tuple[Trainer, Any]:
    made = target.load(script)()
    trainer, data = made if isinstance(made, tuple) and len(made) == 2 else (made, digits()[0])
    if not isinstance(trainer, Trainer):
        raise ModelError(
            f"{script} must give what lockstep.wrap returned, or (trainer, data). Got {type(made).__name__}. "
            "End the function with: return trainer, (x, y)"
        )
    return trainer, data


def _table(digests: Mapping[int, Sequence[str]], width: int) -> Table:
    """One row per step, one column per number of devices; the digests as long as there is room for."""
    room = (width - len("  step  ")) // len(digests) - len("   ")
    characters = min(DIGEST_CHARACTERS, max(LEAST_CHARACTERS, room))
    table = Table("step", *(f"{count} device{'s' * (count > 1)}" for count in digests), box=box.SIMPLE_HEAD)
    for step, row in enumerate(zip(*digests.values(), strict=True), start=1):
        table.add_row(str(step), *(Text(digest[:characters], style="green", no_wrap=True) for digest in row))
    return table


def _listed(counts: Sequence[int]) -> str:
    """The numbers as one reads them aloud.

    >>> _listed((1, 2, 4))
    '1, 2 and 4'
    """
    *others, last = map(str, counts)
    return f"{', '.join(others)} and {last}" if others else last
