"""`lockstep verify`: the same steps on several numbers of devices, and the digest after each."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.cli import devices, scripts, target
from lockstep.datasets import digits
from lockstep.errors import DivergedError, LockstepError, ModelError
from lockstep.trainer import Trainer
from lockstep.training.verify import Verification

DIGEST_CHARACTERS = 16
LEAST_CHARACTERS = 6


@dataclass(frozen=True)
class Question:
    """What is to be compared; `shards` only of a built-in model, `batch_size` only of arrays and data sets."""

    counts: tuple[int, ...]
    steps: int
    shards: int | None = None
    batch_size: int = 256


@dataclass(frozen=True)
class Subject:
    """What is verified: a trainer and its data, which were `lent` where the script gave none."""

    trainer: Trainer[Any]
    data: Any
    lent: bool = False


def show(console: Console, question: Question, subject: Subject) -> None:
    """Prints a table of digests; raises DivergedError, which names step and tensor, where two differ."""
    counts = _listed(question.counts)
    try:
        with subject.trainer, console.status(f"{question.steps} steps on {counts} devices"):
            result = _verify(subject, question)
    except DivergedError as error:
        if error.digests:
            console.print(_table(error.digests, console.width))
        raise
    console.print(_table(result.digests, console.width))
    steps = "1 step" if question.steps == 1 else f"each of {question.steps} steps"
    verdict = f"  The same bits after {steps} on {counts} devices."
    console.print(Text(verdict, style="bold green"))


def built_in(framework: str, question: Question) -> Subject:
    """The network that ships with the package, on accelerators where there are enough, else on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "verify.py")
        path.write_text(scripts.of(framework).verify, encoding="utf-8")
        make = target.load(f"{path}:make_trainer")
    enough = len(devices.available(framework)) >= max(question.counts)
    trainer, data = make(devices=1 if enough else ["cpu"], shards=question.shards)
    return Subject(trainer, data)


def users_own(script: str) -> Subject:
    """The trainer that the script's function gives."""
    made = target.load(script)()
    alone = not (isinstance(made, tuple) and len(made) == 2)
    trainer, data = (made, digits()[0]) if alone else made
    if not isinstance(trainer, Trainer):
        raise ModelError(
            f"{script} must give what lockstep.wrap returned, or (trainer, data). Got {type(trainer).__name__}. "
            "End the function with: return trainer, (x, y)"
        )
    return Subject(trainer, data, lent=alone)


def _verify(subject: Subject, question: Question) -> Verification:
    try:
        return subject.trainer.verify(
            subject.data, steps=question.steps, devices=question.counts, batch_size=question.batch_size
        )
    except LockstepError:
        raise
    except Exception as error:
        if not subject.lent:
            raise
        raise ModelError(
            "A function that gives a trainer alone has it verified on the bundled digits, rows of 64 numbers. "
            f"The model does not take them: {error}. End the function with: return trainer, (x, y)"
        ) from error


def _table(digests: Mapping[int, Sequence[str]], width: int) -> Table:
    """One row per step, one column per number of devices; the digests as long as there is room for."""
    room = (width - len("  step  ")) // len(digests) - len("   ")
    characters = min(DIGEST_CHARACTERS, max(LEAST_CHARACTERS, room))
    short = characters < len("8 devices")
    names = (str(number) if short else f"{number} device{'s' * (number > 1)}" for number in digests)
    table = Table("step", *names, box=box.SIMPLE_HEAD)
    for step, row in enumerate(zip(*digests.values(), strict=True), start=1):
        styles = ["green" if digest == row[0] else "bold red" for digest in row]
        cells = zip(row, styles, strict=True)
        table.add_row(str(step), *(Text(digest[:characters], style=style, no_wrap=True) for digest, style in cells))
    return table


def _listed(counts: Sequence[int]) -> str:
    """The numbers as one reads them aloud.

    >>> _listed((1, 2, 4))
    '1, 2 and 4'
    """
    *others, last = map(str, counts)
    return f"{', '.join(others)} and {last}" if others else last
