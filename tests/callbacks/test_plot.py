"""The picture that keeps up with the run."""

import builtins
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from callbacks.fake_trainer import FakeTrainer, epochs, fit
from lockstep.callbacks import Plot, plot
from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.errors import CallbackError, MissingExtra

PNG = b"\x89PNG"


class Look(Callback):
    """Notes how many epochs had been drawn after each."""

    def __init__(self, drawn: list[int]) -> None:
        self.drawn, self.seen = drawn, list[int]()

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        self.seen.append(self.drawn[-1] if self.drawn else 0)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of epochs in every picture that was drawn."""
    numbers: list[int] = []
    real = plot.draw

    def draw(over: Any, curves: Any, panel_axes: Any) -> Any:
        numbers.append(len(over))
        return real(over, curves, panel_axes)

    monkeypatch.setattr(plot, "draw", draw)
    return numbers


class Clock:
    """A clock on which drawing takes a second and nothing else takes any time but epochs."""

    def __init__(self, epoch: float) -> None:
        self.now, self.epoch, self.reads = 0.0, epoch, 0

    def __call__(self) -> float:
        return self.now


def ticking(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Callback:
    """Makes drawing take a second, and gives a callback that makes epochs take their time."""
    real = plot.replace_file

    def replace(path: Path, data: bytes) -> None:
        clock.now += 1.0
        real(path, data)

    class Tick(Callback):
        def on_epoch_begin(self, epoch: int, logs: Logs = NO_LOGS) -> None:
            clock.now += clock.epoch

    monkeypatch.setattr(plot, "replace_file", replace)
    return Tick()


def test_all_long_epochs_are_drawn(drawn: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, look = Clock(epoch=10.0), Look(drawn)
    tick = ticking(clock, monkeypatch)
    fit(FakeTrainer(), [tick, Plot(tmp_path / "curves.png", clock), look], epochs("loss", [3, 2, 1]))
    assert look.seen == drawn == [1, 2, 3]
    assert [entry.name for entry in tmp_path.iterdir()] == ["curves.png"]
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)


def test_some_short_epochs_are_not_drawn_but_the_last_is(
    drawn: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(epoch=2.0)
    tick = ticking(clock, monkeypatch)
    fit(FakeTrainer(), [tick, Plot(tmp_path / "curves.png", clock)], epochs("loss", [9, 8, 7, 6, 5, 4, 3, 2]))
    assert drawn == [1, 6, 8]  # nine seconds after a picture of one second comes the next


@pytest.mark.parametrize("error", [RuntimeError("in the script"), KeyboardInterrupt()])
def test_an_interrupted_run_is_drawn(
    error: BaseException, drawn: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fail(Callback):
        def on_epoch_begin(self, epoch: int, logs: Logs = NO_LOGS) -> None:
            if epoch == 3:
                raise error

    clock = Clock(epoch=0.0)
    ticking(clock, monkeypatch)
    with pytest.raises(type(error)):
        fit(FakeTrainer(), [Plot(tmp_path / "curves.png", clock), Fail()], epochs("loss", [4, 3, 2, 1]))
    assert drawn == [1, 3]


def test_a_resumed_run_shows_its_whole_history(drawn: list[int], tmp_path: Path) -> None:
    trainer = FakeTrainer()
    fit(trainer, [], epochs("loss", [3, 2]))
    fit(trainer, [Plot(tmp_path / "curves.png")], epochs("loss", [1]), first=2, state=[])
    assert drawn == [3]


@pytest.mark.parametrize(("name", "file", "start"), [("a/b", "a/b.png", PNG), ("c.svg", "c.svg", b"<?xml")])
def test_the_suffix_decides_the_format(name: str, file: str, start: bytes, tmp_path: Path) -> None:
    fit(FakeTrainer(), [Plot(tmp_path / name)], epochs("loss", [3]))
    assert (tmp_path / file).read_bytes().startswith(start)


def test_a_notebook_shows_one_picture_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[list[bytes]] = []

    def display(image: bytes, display_id: bool) -> SimpleNamespace:
        assert display_id
        shown.append([image])
        return SimpleNamespace(update=shown[-1].append)

    module = ModuleType("IPython.display")
    monkeypatch.setattr(module, "display", display, raising=False)
    monkeypatch.setattr(module, "Image", lambda data: data, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(plot, "in_notebook", lambda: True)
    clock = Clock(epoch=10.0)
    callback = Plot(tmp_path / "curves.png", clock)
    for _ in range(2):
        fit(FakeTrainer(), [callback], epochs("loss", [2, 1]))
    assert [[image[:4] for image in images] for images in shown] == [[PNG, PNG], [PNG, PNG]]


def test_training_without_matplotlib_raises_at_the_beginning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    trainer = FakeTrainer()
    with pytest.raises(MissingExtra, match=r'pip install "lockstep-train\[plot\]"'):
        fit(trainer, [Plot(tmp_path / "curves.png")], epochs("loss", [3]))
    assert trainer.num_steps == 0


def test_labels_and_fixed_axes_of_chosen_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    real = plot.draw
    monkeypatch.setattr(plot, "draw", lambda *given: figures.append(real(*given)) or figures[-1])
    curves = {"loss": [3.0, 2.0], "val_accuracy": [0.5, 0.7]}
    chosen = Plot(tmp_path / "c.png", names=["val_accuracy"], ylabel="test acc", xlim=(1, 10), ylim=(0, 1))
    fit(FakeTrainer(), [chosen], [{name: values[epoch] for name, values in curves.items()} for epoch in range(2)])
    for figure in figures:
        (axes,) = figure.axes
        assert (axes.get_xlim(), axes.get_ylim()) == ((1, 10), (0, 1))
        assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("epoch", "test acc", "")
        assert len(axes.lines) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": "loss"}, r"names must be a list\. Got 'loss'\. Use names=\['loss'\]\."),
        (
            {"xlim": 10},
            r"xlim must be a pair: a lower and an upper bound\. Got xlim=10\. Use for example xlim=\(0, 1\)\.",
        ),
        ({"ylim": (1, 0)}, r"ylim must be a pair: a lower and an upper bound\. Got ylim=\(1, 0\)\."),
    ],
)
def test_wrong_axes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CallbackError, match=message):
        Plot(**options)
