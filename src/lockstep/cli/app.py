"""Defines the commands of `lockstep` and their options; each command is implemented in a separate file."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lockstep import __version__
from lockstep.cli import demo as demonstration
from lockstep.cli import devices as hardware
from lockstep.cli import doctor as diagnosis
from lockstep.cli import verify as verification
from lockstep.errors import DivergedError, LockstepError

Framework = Annotated[
    str | None, typer.Option(help="torch, jax, tensorflow or mxnet; without it, the first that is installed.")
]
DIFFERENT, BROKEN, UNUSABLE = 1, 1, 2  # exit codes; UNUSABLE: the command could not run
INTERRUPTED, UNREAD = 130, 141  # as a shell has them for SIGINT and SIGPIPE

app = typer.Typer(
    name="lockstep",
    help="One model, many devices, the same bits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Runs the command given on the command line."""
    app(prog_name="lockstep")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lockstep {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version.")
    ] = False,
) -> None:
    """Handles the options of `lockstep` itself, such as `--version`."""


@app.command()
def demo(
    framework: Framework = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data in each run.")] = demonstration.EPOCHS,
    curves: Annotated[Path, typer.Option(help="Where the picture of the curves goes.")] = Path("lockstep-demo.png"),
    table: Annotated[Path | None, typer.Option(help="Also save the table, as an SVG picture.")] = None,
) -> None:
    """Train digits with Lockstep and with the framework alone.

    Lockstep runs on 1, 2 and 3 replicas; the framework's own data parallelism runs on 1 and 2.
    """
    with _exit_codes():
        if not demonstration.run_demo(Console(), hardware.choose_framework(framework), epochs, curves, table):
            raise typer.Exit(DIFFERENT)


@app.command()
def devices() -> None:
    """Show the devices on which each installed framework can train."""
    with _exit_codes():
        hardware.print_devices(Console())


@app.command()
def doctor() -> None:
    """Check what works here, and say how to fix the rest.

    Exit code 0: nothing is broken; 1: something is.
    """
    with _exit_codes():
        if not diagnosis.run_doctor(Console()):
            raise typer.Exit(BROKEN)


@app.command()
def verify(
    script: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="A function without arguments that returns (trainer, data), or a trainer for the bundled digits. "
            "Without it, a small convolutional network with batch norm and dropout is verified.",
        ),
    ] = None,
    framework: Framework = None,
    devices: Annotated[str, typer.Option(help="The numbers of devices to compare.")] = "1,2,3,4",
    steps: Annotated[int, typer.Option(min=1, help="Training steps at each number of devices.")] = 5,
    shards: Annotated[int | None, typer.Option(min=1, help="Shards of the built-in network.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples in a batch, if the data is arrays.")] = 256,
) -> None:
    """Compare the bits on several numbers of devices.

    Exit code 0: equal; 1: different; 2: the command could not run; 130: Ctrl-C.
    """
    if script is not None and shards is not None:
        raise typer.BadParameter(
            "--shards cannot be used with a script. Use lockstep.wrap(..., shards=...) in the script."
        )
    if script is not None and framework is not None:
        raise typer.BadParameter(
            "--framework cannot be used with a script, whose trainer has a framework already. Leave --framework out."
        )
    request = verification.Request(_parse_counts(devices), steps, shards, batch_size)
    with _exit_codes():
        if script is None:
            subject = verification.build_bundled(hardware.choose_framework(framework), request)
        else:
            subject = verification.load_script(script)
        verification.run_verify(Console(), request, subject)


def _parse_counts(text: str) -> tuple[int, ...]:
    """Returns the numbers of devices in a text such as `1,2,4`; raises if they are not two or more different numbers.

    >>> _parse_counts("1,2, 4")
    (1, 2, 4)
    """
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if len(counts) < 2 or min(counts) < 1 or len(set(counts)) < len(counts):
        raise typer.BadParameter(
            f"--devices {text!r} must be two or more different numbers of devices, each 1 or more, separated by "
            "commas. Use for example 1,2,4."
        )
    return counts


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Converts exceptions to exit codes. Code 1 means that bits differ, so that a calling script can rely on it.

    A LockstepError is printed without a traceback, an error of the user's script with a traceback.
    """
    try:
        yield
    except typer.Exit:
        raise
    except LockstepError as error:
        Console(stderr=True).print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(DIFFERENT if isinstance(error, DivergedError) else UNUSABLE) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (Exception, SystemExit) as error:  # also a script's sys.exit(1), which must not look like different bits
        if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):  # rich's, in `| head`
            raise typer.Exit(UNREAD) from None
        traceback.print_exc()
        raise typer.Exit(UNUSABLE) from None
