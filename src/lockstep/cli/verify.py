"""`lockstep verify`: trains the same steps on several numbers of devices and compares the digests after each step."""

import importlib.util
import inspect
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.cli import devices, scripts
from lockstep.datasets import digits
from lockstep.errors import DivergedError, LockstepError, ModelError
from lockstep.trainer import Trainer
from lockstep.training.verify import Verification

DIGEST_CHARACTERS = 16
MIN_CHARACTERS = 6
MODULE = "lockstep_target"  # the script's module; its own name may be that of another module, such as `test`


@dataclass(frozen=True)
class Request:
    """The options of `lockstep verify`: `counts` are the numbers of devices to compare.

    `shards` is used for the bundled model only, and `batch_size` for arrays and data sets only.
    """

    counts: tuple[int, ...]
    steps: int
    shards: int | None = None
    batch_size: int = 256


@dataclass(frozen=True)
class Subject:
    """The trainer that is verified, and the data on which it trains."""

    trainer: Trainer[Any]
    data: Any
    is_bundled_data: bool = False  # whether the script returned no data, so that the bundled digits are used


def run_verify(console: Console, request: Request, subject: Subject) -> None:
    """Prints a table of digests; raises DivergedError, which names the step and the array, if two digests differ."""
    counts = _join_counts(request.counts)
    try:
        with subject.trainer, console.status(f"{request.steps} steps on {counts} devices"):
            result = _verify(subject, request)
    except DivergedError as error:
        if error.digests:
            console.print(_build_table(error.digests, console.width))
        raise
    console.print(_build_table(result.digests, console.width))
    steps = "1 step" if request.steps == 1 else f"each of {request.steps} steps"
    verdict = f"  The same bits after {steps} on {counts} devices."
    console.print(Text(verdict, style="bold green"))


def build_bundled(framework: str, request: Request) -> Subject:
    """Returns a trainer of the bundled model and its data, on the CPU unless there are enough accelerators."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "verify.py")
        path.write_text(scripts.load_scripts(framework).verify, encoding="utf-8")
        make_trainer = load_function(f"{path}:make_trainer")
    is_enough = len(devices.list_accelerators(framework)) >= max(request.counts)
    trainer, data = make_trainer(devices=1 if is_enough else ["cpu"], shards=request.shards)
    return Subject(trainer, data)


def load_script(script: str) -> Subject:
    """Returns the trainer and the data that the function `FILE.py:FUNCTION` returns.

    If it returns a trainer only, the data is the bundled digits.
    """
    result = load_function(script)()
    has_data = isinstance(result, tuple) and len(result) == 2
    trainer, data = result if has_data else (result, digits()[0])
    if not isinstance(trainer, Trainer):
        raise ModelError(
            f"{script} returned {type(trainer).__name__}, not a trainer from lockstep.wrap, or (trainer, data). "
            "End the function with: return trainer, (x, y)"
        )
    return Subject(trainer, data, is_bundled_data=not has_data)


def load_function(text: str) -> Callable[..., Any]:
    """Returns the function that `FILE.py:FUNCTION` names.

    The file is imported, so code under `if __name__ == "__main__"` does not run. Its functions and classes are pickled
    by value, so the workers need not find the file.
    """
    path, _, name = text.rpartition(":")
    if not path or not name.isidentifier():
        raise ModelError(f"{text!r} must have the form FILE.py:FUNCTION. Use for example train.py:make_trainer.")
    if not Path(path).is_file():
        raise ModelError(
            f"The file {path!r} does not exist. Give a path relative to {Path.cwd()}, or an absolute path."
        )
    module = _import_file(Path(path).resolve())
    function = getattr(module, name, None)
    if not callable(function):
        raise ModelError(f"{path} defines no function {name!r}. Use one of its functions: {_list_functions(module)}.")
    result: Callable[..., Any] = function
    return result


def _import_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as Python does for a script; workers get the same path
    arguments = sys.argv
    sys.argv = [str(path)]  # a script that reads its arguments must not get those of `lockstep verify`
    try:
        spec.loader.exec_module(module)
    finally:
        sys.argv = arguments
    cloudpickle.register_pickle_by_value(module)
    return module


def _list_functions(module: Any) -> str:
    own = [name for name, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == MODULE]
    return ", ".join(own) or "(it defines none)"


def _verify(subject: Subject, request: Request) -> Verification:
    try:
        return subject.trainer.verify(
            subject.data, steps=request.steps, devices=request.counts, batch_size=request.batch_size
        )
    except LockstepError:
        raise
    except Exception as error:
        if not subject.is_bundled_data:
            raise
        raise ModelError(
            "The function returned a trainer without data, and its model does not accept the bundled digits, which are "
            f"rows of 64 numbers: {error}. End the function with: return trainer, (x, y)"
        ) from error


def _build_table(digests: Mapping[int, Sequence[str]], width: int) -> Table:
    """Returns a table of digests with a row for each step and a column for each number of devices.

    The digests are shortened so that the table fits into `width` columns.
    """
    column_width = (width - len("  step  ")) // len(digests) - len("   ")
    characters = min(DIGEST_CHARACTERS, max(MIN_CHARACTERS, column_width))
    is_short = characters < len("8 devices")
    names = (str(number) if is_short else f"{number} device{'s' * (number > 1)}" for number in digests)
    table = Table("step", *names, box=box.SIMPLE_HEAD)
    for step, row in enumerate(zip(*digests.values(), strict=True), start=1):
        styles = ["green" if digest == row[0] else "bold red" for digest in row]
        cells = zip(row, styles, strict=True)
        table.add_row(str(step), *(Text(digest[:characters], style=style, no_wrap=True) for digest, style in cells))
    return table


def _join_counts(counts: Sequence[int]) -> str:
    """Returns the numbers as text, separated by commas and `and`.

    >>> _join_counts((1, 2, 4))
    '1, 2 and 4'
    """
    *others, last = map(str, counts)
    return f"{', '.join(others)} and {last}" if others else last
