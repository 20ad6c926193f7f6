"""What `fit` shows: in a terminal, in a file, in a notebook; and what it leaves behind."""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from io import StringIO
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from lockstep.callbacks import CallbackList, History
from lockstep.callbacks.base import Params
from lockstep.core.time_breakdown import Breakdown
from lockstep.display.bar import Bar, Speed
from lockstep.display.epoch_line import EpochLine
from lockstep.display.number_format import format_significant
from lockstep.display.progress import Progress
from lockstep.display.terminal import Notebook, choose_screen

OPENING = "2 devices (cpu:0, cpu:1), 8 shards of 32, batch 256, 1 thread per shard, seed 0"
LOGS = {"loss": 0.412, "accuracy": 0.861, "val_loss": 0.398, "val_accuracy": 0.87}
LINE = "loss 0.4120  accuracy 0.8610  val_loss 0.3980  val_accuracy 0.8700  9.2 s  6,522 samples/s"
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class LazyLogs(Mapping[str, float]):
    """Logs that count how often they are read."""

    def __init__(self, values: dict[str, float]) -> None:
        self.values_, self.reads = values, 0

    def __getitem__(self, name: str) -> float:
        self.reads += 1
        return self.values_[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


class Run:
    """A fake `fit` on a fake clock: 235 steps an epoch of 9.2 seconds."""

    def __init__(self, console: Console | None, **params: Any) -> None:
        self.clock = Clock()
        self.history = History(devices=("cpu:0", "cpu:1"))
        self.trainer = SimpleNamespace(
            opening=OPENING, resumed="", history=self.history, stop_training=False, breakdown=None
        )
        self.params: Params = {"epochs": 10, "steps": 235, "batch_size": 256, "examples": 60_000}
        self.params.update(params)  # type: ignore[typeddict-item]
        self.progress = Progress(console=console, clock=self.clock)
        self.chain = CallbackList([self.progress], self.trainer, self.params)

    def steps(self, number: int, logs: Mapping[str, float], first: int = 0) -> None:
        for batch in range(first, first + number):
            self.clock.now += 9.2 / 235
            self.chain.on_train_batch_end(batch, logs)

    def epoch(self, epoch: int, *, record: bool = True) -> None:
        self.chain.on_epoch_begin(epoch)
        self.steps(235, {"loss": 0.412, "accuracy": 0.861})
        self.chain.on_test_begin()
        self.clock.now += 50.0  # validation does not count as training
        self.chain.on_test_end()
        if record:
            self.history.record(epoch, LOGS, seconds=9.2)
        self.chain.on_epoch_end(epoch, LOGS)


def terminal(width: int = 100) -> tuple[Console, StringIO]:
    file = StringIO()
    console = Console(
        file=file, force_terminal=True, force_interactive=True, width=width, color_system=None, _environ={}
    )
    return console, file


def plain() -> tuple[Console, StringIO]:
    file = StringIO()
    return Console(file=file, force_terminal=False, width=80, _environ={}), file


def drawn(renderable: object, width: int) -> list[str]:
    console = Console(file=StringIO(), force_terminal=False, width=width, _environ={})
    with console.capture() as capture:
        console.print(renderable)
    return capture.get().splitlines()


# ---------------------------------------------------------------- a file or a pipe


def test_a_file_gets_one_line_per_epoch_and_nothing_else() -> None:
    console, file = plain()
    run = Run(console)
    run.chain.on_train_begin()
    run.epoch(0)
    run.epoch(1)
    run.chain.on_train_end(LOGS)
    run.chain.close()
    assert file.getvalue().splitlines() == [
        OPENING,
        f"epoch  1/10  {LINE}",
        f"epoch  2/10  {LINE}",
        "val acc: 0.87, 9.2 sec/epoch on 2 devices: cpu:0, cpu:1",
    ]
    assert "\x1b" not in file.getvalue()


def test_a_file_never_makes_a_step_read_its_logs() -> None:
    run = Run(plain()[0])
    logs = LazyLogs({"loss": 1.0})
    run.chain.on_train_begin()
    run.chain.on_epoch_begin(0)
    run.steps(235, logs)
    assert logs.reads == 0


def test_without_a_record_the_epoch_is_timed_here_up_to_validation() -> None:
    console, file = plain()
    run = Run(console)
    run.chain.on_train_begin()
    run.epoch(0, record=False)
    assert f"epoch  1/10  {LINE}" in file.getvalue()


@pytest.mark.parametrize(
    ("params", "speed"),
    [
        ({}, "6,522 samples/s"),
        ({"examples": None}, "6,539 samples/s"),  # 235 full batches, as far as anyone knows
        ({"examples": None, "batch_size": None}, "25.5 steps/s"),
        ({"batch_size": None}, "6,522 samples/s"),
        ({"batch_size": None, "steps": None}, "25.5 steps/s"),
    ],
)
def test_speed_counts_samples_where_they_are_known(params: dict[str, Any], speed: str) -> None:
    console, file = plain()
    run = Run(console, **params)
    run.chain.on_train_begin()
    run.epoch(0)
    assert file.getvalue().splitlines()[-1].endswith(f"9.2 s  {speed}")


def test_the_opening_may_come_with_the_first_batch() -> None:
    console, file = plain()
    run = Run(console)
    run.trainer.opening = ""
    run.chain.on_train_begin()
    run.chain.on_epoch_begin(0)
    assert file.getvalue() == ""
    run.trainer.opening = OPENING
    run.steps(3, {"loss": 1.0})
    assert file.getvalue() == OPENING + "\n"


def test_a_breakdown_comes_last() -> None:
    file = StringIO()
    run = Run(Console(file=file, width=100))
    parts = [{"input": 6.0, "compute": 2.0, "exchange": 1.0, "update": 1.0}] * 2
    run.trainer.breakdown = Breakdown(("cpu:0", "cpu:1"), parts, 10.0, 100, 25_600)
    run.chain.on_train_begin()
    run.chain.on_train_end()
    run.chain.close()
    text = file.getvalue()
    assert re.search(r"ms a step +input +compute +exchange +update +rest", text)
    assert re.search(r"cpu:1 +60\.00 \(60%\) +20\.00 \(20%\) +10\.00 \(10%\) +10\.00 \(10%\) +0\.00 \(0%\)", text)
    assert "2,560 samples/s. 60 % of the step waits for input: add .prefetch(2)" in text


def test_a_resumed_run_says_where_after_the_opening() -> None:
    console, file = plain()
    run = Run(console)
    run.trainer.resumed = "resumed at epoch 2, batch 120"
    run.chain.on_train_begin()
    run.chain.on_epoch_begin(1)
    run.steps(3, {"loss": 1.0}, first=120)
    assert file.getvalue().splitlines() == [OPENING, "resumed at epoch 2, batch 120"]


@pytest.mark.parametrize(("first", "speed"), [(0, "  6,522 samples/s"), (120, "  6,522 samples/s"), (235, "")])
def test_an_epoch_resumed_in_its_middle_has_its_own_speed(first: int, speed: str) -> None:
    """The time is the whole epoch's, so the steps are too; where none was left to make, there is no speed."""
    console, file = plain()
    run = Run(console)
    run.chain.on_train_begin()
    run.chain.on_epoch_begin(1)
    run.steps(235 - first, {"loss": 0.412}, first=first)
    run.history.record(1, {"loss": 0.412}, seconds=9.2)
    run.chain.on_epoch_end(1, {"loss": 0.412})
    assert file.getvalue().splitlines()[-1] == f"epoch  2/10  loss 0.4120  9.2 s{speed}"


def test_a_pipe_stays_a_pipe_where_colors_are_forced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert Console().is_terminal  # rich believes it, or this test says nothing
    run = Run(None)
    run.chain.on_train_begin()
    run.epoch(0)
    run.chain.on_train_end()
    text = capsys.readouterr().out
    assert len(text.splitlines()) == 3
    assert HIDE_CURSOR not in text


# ---------------------------------------------------------------- a terminal


def test_a_terminal_shows_the_epoch_as_it_goes() -> None:
    console, file = terminal()
    run = Run(console)
    run.chain.on_train_begin()
    run.chain.on_epoch_begin(0)
    run.steps(120, {"loss": 0.412, "accuracy": 0.861})
    last = file.getvalue().split("\x1b[2K")[-1]
    assert last.startswith("epoch  1/10 ━")
    # Every third step is 0.117 s after the last drawn one.
    assert last.rstrip().endswith("120/235 6,539 samples/s loss 0.4120  accuracy 0.8610 0:05 left")
    run.chain.close()


def test_a_terminal_keeps_a_line_per_epoch_and_gets_its_cursor_back() -> None:
    console, file = terminal(width=120)
    run = Run(console)
    run.chain.on_train_begin()
    run.epoch(0)
    run.chain.on_train_end(LOGS)
    text = file.getvalue()
    assert "validating" in text
    assert f"epoch  1/10  {LINE}\n" in text
    assert text.endswith("val acc: 0.87, 9.2 sec/epoch on 2 devices: cpu:0, cpu:1\n")
    assert text.rfind(SHOW_CURSOR) > text.rfind(HIDE_CURSOR) >= 0
    before = file.getvalue()
    run.chain.close()
    assert file.getvalue() == before


def test_logs_are_read_no_more_than_ten_times_a_second() -> None:
    run = Run(terminal()[0])
    logs = LazyLogs({"loss": 1.0})
    run.chain.on_train_begin()
    run.chain.on_epoch_begin(0)
    for batch in range(10_000):  # one second of very short steps
        run.clock.now += 1e-4
        run.chain.on_train_batch_end(batch, logs)
    run.chain.close()
    assert 8 <= logs.reads <= 10


@pytest.mark.parametrize("error", [RuntimeError("in the script"), KeyboardInterrupt()])
def test_an_unfinished_fit_gives_the_terminal_back(error: BaseException) -> None:
    console, file = terminal()
    run = Run(console)
    before = sys.stdout, sys.stderr

    def fit() -> None:
        try:
            run.chain.on_train_begin()
            run.chain.on_epoch_begin(0)
            run.steps(120, {"loss": 0.412})
            assert sys.stdout is not before[0]  # prints go above the bar meanwhile
            raise error
        finally:
            run.chain.close()
            run.chain.close()

    with pytest.raises(type(error)):
        fit()
    text = file.getvalue()
    assert text.rfind(SHOW_CURSOR) > text.rfind(HIDE_CURSOR) >= 0
    assert (sys.stdout, sys.stderr) == before
    assert "120/235" in text[text.rfind("epoch") :]  # where it stopped stays in view


def test_close_before_the_start_is_harmless() -> None:
    Progress(console=terminal()[0]).close()


def test_one_progress_serves_two_fits() -> None:
    console, file = plain()
    run = Run(console)
    for _ in range(2):
        run.chain.on_train_begin()
        run.epoch(0)
        run.chain.on_train_end()
        run.chain.close()
    assert file.getvalue().count(OPENING) == 2


# ---------------------------------------------------------------- the bar and the summary


BAR = Bar(
    title="epoch 1/10",
    step=12,
    steps=235,
    values={"loss": 0.412, "accuracy": 0.861},
    speed=Speed(6521.0, "samples"),
    left=34.2,
)


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (120, f"epoch 1/10 ━╸{' ' * 28}  12/235 6,521 samples/s loss 0.4120  accuracy 0.8610 0:35 left"),
        (100, f"epoch 1/10 ━{' ' * 22}  12/235 6,521 samples/s loss 0.4120  accuracy 0.8610 0:35 left"),
        (82, f"epoch 1/10 ╸{' ' * 12}  12/235 6,521/s loss 0.4120  accuracy 0.8610 0:35 left"),
        (70, "epoch 1/10  12/235 6,521/s loss 0.4120  accuracy 0.8610 0:35 left"),
        (64, "epoch 1/10  12/235 loss 0.4120  accuracy 0.8610  … 0:35 left"),  # the speed goes before a metric
        (60, "epoch 1/10  12/235 6,521/s loss 0.4120  … 0:35 left"),
        (40, "epoch 1/10  12/235 loss 0.4120  …"),
        (26, "epoch 1/10  12/235 …"),
    ],
)
def test_a_bar_fits_its_line(width: int, expected: str) -> None:
    (line,) = drawn(BAR, width)
    assert line == expected
    assert len(line) <= width - 3


@pytest.mark.parametrize("width", range(1, 160))
def test_a_bar_is_one_line_at_any_width(width: int) -> None:
    assert len(drawn(BAR, width)) == 1


def test_a_bar_of_unknown_length_counts_steps() -> None:
    (line,) = drawn(Bar(title="epoch 1/10", step=12, values={"loss": 0.5}), 80)
    assert line.rstrip().endswith("step 12 loss 0.5000")


def test_a_summary_never_cuts_a_fact() -> None:
    facts = tuple(f"{name} 0.1234" for name in ("loss", "accuracy", "val_loss", "val_accuracy"))
    for width in range(31, 90):  # from the widest fact after the title upwards
        lines = drawn(EpochLine("epoch 1/10", facts), width)
        assert "  ".join(line.removeprefix("epoch 1/10").strip() for line in lines).split("  ") == list(facts)


# ---------------------------------------------------------------- a notebook


def test_a_notebook_replaces_one_output_per_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[list[object]] = []

    def display(renderable: object, display_id: bool) -> SimpleNamespace:
        assert display_id
        shown.append([renderable])
        return SimpleNamespace(update=shown[-1].append)

    module = ModuleType("IPython.display")
    monkeypatch.setattr(module, "display", display, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    screen = choose_screen(Console(force_jupyter=True))
    assert isinstance(screen, Notebook)
    for line in ("first", "second"):
        screen.show(BAR)
        screen.show(BAR)
        screen.keep(Text(line))
    screen.close()
    assert shown == [[BAR, BAR, Text("first")], [BAR, BAR, Text("second")]]


def test_what_a_notebook_is_given_can_show_itself_there() -> None:
    for renderable in (BAR, EpochLine("epoch 1/10", ("loss 0.4120",)), Text("val acc: 0.93")):
        bundle = renderable._repr_mimebundle_([], [])
        assert bundle["text/html"].startswith("<pre")


LONG = {"loss": 0.6931, "a_long_metric_name_as_people_write_them_mean_over_all_classes_x": 1.2345e-05, "acc": 0.8125}


@pytest.mark.parametrize("width", [120, 80, 70, 60, 50, 40, 30, 20])
def test_a_number_is_shown_whole_or_not_at_all(width: int) -> None:
    """1.234 is another number than 1.234e-05, of which it is the beginning."""
    bar = replace(BAR, values=LONG)
    numbers = {"0.6931", "1.234e-05", "0.8125"}
    lines = drawn(bar, width)
    assert set(re.findall(r"(?<![\w.])\d+\.\d+\S*", "\n".join(lines))) <= numbers
    facts = [f"{name} {format_significant(value)}" for name, value in LONG.items()]
    found = re.findall(r"\d+\.\d+\S*", "\n".join(drawn(EpochLine("epoch 1/1", tuple(facts)), width)))
    assert set(found) == numbers
