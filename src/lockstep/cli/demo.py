"""`lockstep demo`: trains on 1, 2 and 3 replicas, and with the framework's own data parallelism, and compares both.

Each run is a script that is started as `python train.py …` in a temporary folder, as a user would start it. The demo
shows what these scripts print and write.
"""

import csv
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from lockstep.callbacks import History
from lockstep.cli import scripts
from lockstep.display.number_format import format_duration
from lockstep.errors import MissingExtra, SaveError, WorkerError
from lockstep.launch.deferred_signals import defer_interrupts
from lockstep.launch.environment import build_worker_environment

EPOCHS = 10  # as in the scripts
REPLICAS = (1, 2, 3)
PEERS = (1, 2)
DIGEST_CHARACTERS = 16
SVG_COLUMNS = 66
NOTE = """\
  s/epoch is the median. Lockstep computes the same shards of a batch on any
  number of devices; {title} computes one part of the batch on each.
"""


@dataclass(frozen=True)
class DemoRun:
    """The results of one run of a script: the history and the digest of the trained model."""

    title: str
    num_devices: int
    history: History
    digest: str

    @property
    def accuracy(self) -> float:
        """The accuracy on the test images after the last epoch."""
        return self.history.history["val_accuracy"][-1]

    @property
    def seconds(self) -> float:
        """The median time per epoch, because the first epoch includes the start of the processes."""
        return statistics.median(self.history.seconds)


def run_demo(console: Console, framework: str, epochs: int, curves: Path, picture: Path | None) -> bool:
    """Runs all scripts and prints the results; returns whether the digests of all runs with Lockstep are equal."""
    if picture is not None:
        _check_writable(picture)
    own = scripts.load_scripts(framework)
    peer = own.peer
    train = _with_epochs(own.train, epochs)
    runs = [("Lockstep", own.file, train, count, ["cpu"] * count) for count in REPLICAS]
    runs += [(peer.title, peer.file, _with_epochs(peer.text, epochs), count, [str(count)]) for count in PEERS]
    outcomes = []
    for title, name, text, count, arguments in runs:
        with console.status(f"{title} on {count} device{'s' * (count > 1)}: python {name} {' '.join(arguments)}"):
            outcomes.append(run_script(title, name, text, count, arguments))
    ours, theirs = outcomes[: len(REPLICAS)], outcomes[len(REPLICAS) :]
    verdict = _format_verdict(_have_equal_digests(ours), _have_equal_digests(theirs), peer)
    note = Text(NOTE.format(title=peer.title), style="dim")
    console.print(Group(_build_table(ours, theirs, times=True), verdict, note))
    console.print(Text(f"{ours[-1].history.summarize()}\n{_draw(ours[-1].history, curves)}\n"), soft_wrap=True)
    console.print(Text(f"What was run, as python {own.file} cpu cpu cpu:\n"))
    console.print(Syntax(train, "python", background_color="default", word_wrap=True))
    if picture is not None:
        _save(Group(_build_table(ours, theirs, times=False), verdict), picture)
    return _have_equal_digests(ours)


def run_script(title: str, name: str, text: str, num_devices: int, arguments: list[str]) -> DemoRun:
    """Runs a script in a temporary folder and returns its results; kills its processes if this is interrupted."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-demo-")))
        (folder / name).write_text(text, encoding="utf-8")
        with defer_interrupts():
            process = subprocess.Popen(
                [sys.executable, name, *arguments],
                cwd=folder,
                env=build_worker_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                process_group=0,  # so that all its processes can be killed, and Ctrl-C reaches this process only
            )
            stack.callback(_end, process)
        stdout, stderr = process.communicate()
        if process.returncode:
            raise WorkerError(f"{name} failed with exit code {process.returncode}. Its error output:\n{stderr}")
        history = History(tuple(f"cpu:{index}" for index in range(num_devices)))
        with open(folder / "history.csv", newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                values = {key: float(value) for key, value in row.items()}
                history.record(int(values.pop("epoch")), values, values.pop("seconds"))
        return DemoRun(title, num_devices, history, stdout.split()[-1])


def _end(process: "subprocess.Popen[str]") -> None:
    with process:  # closes the pipes and waits
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _with_epochs(text: str, epochs: int) -> str:
    return text.replace(f"epochs={EPOCHS}", f"epochs={epochs}").replace(f"range({EPOCHS})", f"range({epochs})")


def _build_table(ours: list[DemoRun], theirs: list[DemoRun], *, times: bool) -> Table:
    """Returns a table with one run per row; `times=False` leaves out the times, which depend on the machine."""
    table = Table("", box=box.SIMPLE_HEAD)
    for heading in ("devices", "test accuracy", *(["s/epoch"] if times else [])):
        table.add_column(heading, justify="right")
    table.add_column("digest", no_wrap=True)
    for group in (ours, theirs):
        for outcome in group:
            table.add_row(
                outcome.title,
                str(outcome.num_devices),
                f"{outcome.accuracy:.4f}",
                *([format_duration(outcome.seconds)] if times else []),
                Text(outcome.digest[:DIGEST_CHARACTERS], style="green" if _have_equal_digests(group) else "red"),
            )
        table.add_section()
    return table


def _format_verdict(ours: bool, theirs: bool, peer: scripts.Peer) -> Text:
    if not ours:
        return Text("  Lockstep: the digests differ, and they must not. Please report this.\n", style="bold red")
    return Text.assemble(
        ("  Lockstep: 1, 2 and 3 devices, the same model to the last bit.\n", "bold green"),
        (f"  {peer.title}: the same model on 1 and 2 {peer.units}, this time.\n", "bold")
        if theirs
        else (f"  {peer.title}: 1 and 2 {peer.units}, two different models.\n", "bold red"),
    )


def _have_equal_digests(outcomes: list[DemoRun]) -> bool:
    return len({outcome.digest for outcome in outcomes}) == 1


def _draw(history: History, path: Path) -> str:
    try:
        return f"The curves: {history.plot(path)}"
    except MissingExtra as error:
        return str(error)


def _check_writable(path: Path) -> None:
    """Raises SaveError if the picture cannot be written to `path`; called before training starts."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise SaveError(f"--table {path} cannot be written: {error.strerror or error}. Use another path.") from error


def _save(result: Group, path: Path) -> None:
    """Writes the table as an SVG picture, which is as wide as the table and has no embedded fonts."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(file=nowhere, record=True, width=SVG_COLUMNS, force_terminal=True)
        console.print(result)
        drawn = console.export_svg(title="lockstep demo", unique_id="lockstep-demo")
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")
    path.write_text(drawn, encoding="utf-8")
