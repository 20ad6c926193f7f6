"""The commands and their options; each does its work in a file of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lockstep.cli import demo as demonstration
from lockstep.cli import devices as hardware
from lockstep.cli import verify as verification
from lockstep.errors import DivergedError, LockstepError

Framework = Annotated[
    str | None, typer.Option(help="torch, jax, tensorflow or mxnet; without it, the first that is installed.")
]
DIFFERENT, UNUSABLE = 1, 2  # exit codes: bits differ; the command could not do its work

app = typer.Typer(
    name="lockstep",
    help="One model, many devices, the same bits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Runs the command line."""
    app()


@app.command()
def demo(
    framework: Framework = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data in each run.")] = demonstration.EPOCHS,
    curves: Annotated[Path, typer.Option(help="Where the picture of the curves goes.")] = Path("lockstep-demo.png"),
    table: Annotated[Path | None, typer.Option(help="Also save the table, as an SVG picture.")] = None,
) -> None:
    """Train digits on 1, 2 and 3 replicas, and on 1 and 2 with what the framework's users write today."""
    with _told():
        if not demonstration.show(Console(), hardware.chosen(framework), epochs, curves, table):
            raise typer.Exit(DIFFERENT)


@app.command()
def devices() -> None:
    """Show what each installed framework can train on here."""
    with _told():
        hardware.show(Console())


@app.command()
def verify(
    script: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="A function that takes nothing and gives (trainer, data), or a trainer of the bundled digits. "
            "Without it, a small convolutional network with batch norm and dropout is verified.",
        ),
    ] = None,
    framework: Framework = None,
    devices: Annotated[str, typer.Option(help="The numbers of devices to compare.")] = "1,2,3,4",
    steps: Annotated[int, typer.Option(min=1, help="Training steps at each number of devices.")] = 5,
    shards: Annotated[int | None, typer.Option(min=1, help="Shards of the built-in network.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples in a batch, where data comes as arrays.")] = 256,
) -> None:
    """Make the same steps on each number of devices and compare the bits."""
    if script is not None and shards is not None:
        raise typer.BadParameter("A script's trainer has its own. Use lockstep.wrap(..., shards=...) there.")
    if script is not None and framework is not None:
        raise typer.BadParameter("A script's trainer has its own framework. Leave --framework out.")
    question = verification.Question(_counts(devices), steps, shards, batch_size)
    with _told():
        if script is None:
            subject = verification.built_in(hardware.chosen(framework), question)
        else:
            subject = verification.users_own(script)
        verification.show(Console(), question, subject)


def _counts(text: str) -> tuple[int, ...]:
    """The numbers of devices out of `1,2,4`.

    >>> _counts("1,2, 4")
    (1, 2, 4)
    """
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1 or len(set(counts)) < len(counts):
        raise typer.BadParameter(f"--devices lists different whole numbers from 1 on. Got {text!r}. Use 1,2,4.")
    return counts


@contextmanager
def _told() -> Iterator[None]:
    """Says what Lockstep raised on purpose in its own words, without a traceback, and leaves with its exit code."""
    try:
        yield
    except LockstepError as error:
        Console(stderr=True).print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(DIFFERENT if isinstance(error, DivergedError) else UNUSABLE) from None
