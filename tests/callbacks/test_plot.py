"""The picture that keeps up with the run."""

import builtins
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from callbacks.fake_trainer import Stage, epochs, fit
from lockstep.callbacks import Plot, plot
from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.errors import MissingExtra

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

    def draw(over: Any, curves: Any) -> Any:
        numbers.append(len(over))
        return real(over, curves)

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
    real = plot.replace

    def replace(path: Path, data: bytes) -> None:
        clock.now += 1.0
        real(path, data)

    class Tick(Callback):
        def on_epoch_begin(self, epoch: int, logs: Logs = NO_LOGS) -> None:
            clock.now += clock.epoch

    monkeypatch.setattr(plot, "replace", replace)
    return Tick()


def test_long_epochs_are_all_drawn(drawn: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, look = Clock(epoch=10.0), Look(drawn)
    tick = ticking(clock, monkeypatch)
    fit(Stage(), [tick, Plot(tmp_path / "curves.png", clock), look], epochs("loss", [3, 2, 1]))
    assert look.seen == drawn == [1, 2, 3]
    assert [entry.name for entry in tmp_path.iterdir()] == ["curves.png"]
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)


def test_short_epochs_are_passed_over_but_the_last(
    drawn: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(epoch=2.0)
    tick = ticking(clock, monkeypatch)
    fit(Stage(), [tick, Plot(tmp_path / "curves.png", clock)], epochs("loss", [9, 8, 7, 6, 5, 4, 3, 2]))
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
        fit(Stage(), [Plot(tmp_path / "curves.png", clock), Fail()], epochs("loss", [4, 3, 2, 1]))
    assert drawn == [1, 3]


def test_a_resumed_run_shows_its_whole_history(drawn: list[int], tmp_path: Path) -> None:
    stage = Stage()
    fit(stage, [], epochs("loss", [3, 2]))
    fit(stage, [Plot(tmp_path / "curves.png")], epochs("loss", [1]), first=2, state=[])
    assert drawn == [3]


@pytest.mark.parametrize(("name", "file", "start"), [("a/b", "a/b.png", PNG), ("c.svg", "c.svg", b"<?xml")])
def test_the_file_extension_selects_the_format(name: str, file: str, start: bytes, tmp_path: Path) -> None:
    fit(Stage(), [Plot(tmp_path / name)], epochs("loss", [3]))
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
        fit(Stage(), [callback], epochs("loss", [2, 1]))
    assert [[image[:4] for image in images] for images in shown] == [[PNG, PNG], [PNG, PNG]]


def test_without_matplotlib_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    stage = Stage()
    with pytest.raises(MissingExtra, match=r'pip install "lockstep-train\[plot\]"'):
        fit(stage, [Plot(tmp_path / "curves.png")], epochs("loss", [3]))
    assert stage.num_steps == 0
