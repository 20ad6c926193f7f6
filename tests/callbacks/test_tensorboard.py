"""Event files, read back with TensorBoard's own reader."""

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks.fake_trainer import Stage, fit
from lockstep.callbacks import TensorBoard
from lockstep.errors import CallbackError, MissingExtra

EPOCHS = [{"loss": 4.0, "accuracy": 0.25, "val_loss": 5.0}, {"loss": 2.0, "accuracy": 0.5, "val_loss": 3.0}]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every tag's steps and values."""
    read = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_epochs_are_written_as_keras_names_them(tmp_path: Path) -> None:
    fit(Stage((0.5, 0.25)), [TensorBoard(tmp_path)], EPOCHS)
    assert scalars(tmp_path / "train") == {
        "epoch_loss": [(0, 4.0), (1, 2.0)],
        "epoch_accuracy": [(0, 0.25), (1, 0.5)],
        "epoch_learning_rate": [(0, 0.5), (1, 0.5)],
        "epoch_learning_rate_1": [(0, 0.25), (1, 0.25)],
    }
    assert scalars(tmp_path / "validation") == {"epoch_loss": [(0, 5.0), (1, 3.0)]}


def test_steps_are_written_where_asked(tmp_path: Path) -> None:
    fit(Stage((0.5,)), [TensorBoard(tmp_path, every=2)], [{"loss": 4.0}, {"loss": 2.0}], steps=3)
    assert scalars(tmp_path / "train") == {
        "batch_loss": [(2, 4.0), (4, 2.0), (6, 2.0)],
        "batch_learning_rate": [(2, 0.5), (4, 0.5), (6, 0.5)],
        "epoch_loss": [(0, 4.0), (1, 2.0)],
        "epoch_learning_rate": [(0, 0.5), (1, 0.5)],
    }
    assert not (tmp_path / "validation").exists()  # there was none


def test_an_epoch_can_be_seen_when_it_ends(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.set_trainer(Stage())
    board.on_train_begin()
    board.on_epoch_begin(0)
    board.on_epoch_end(0, {"loss": 4.0})
    try:
        assert scalars(tmp_path / "train")["epoch_loss"] == [(0, 4.0)]
    finally:
        board.close()
        board.close()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_resumed_run_removes_events_that_it_writes_again(lost: int, tmp_path: Path) -> None:
    values = [{"loss": float(epoch), "val_loss": float(epoch)} for epoch in range(5)]
    stage = Stage()
    fit(stage, [TensorBoard(tmp_path)], values[: 2 + lost])  # crashed here
    stage.num_steps, stage.resumed = 4, "resumed at epoch 2"
    fit(stage, [TensorBoard(tmp_path)], values[2:], first=2)
    for run in ("train", "validation"):
        assert scalars(tmp_path / run)["epoch_loss"] == [(epoch, float(epoch)) for epoch in range(5)]


def test_a_resumed_run_takes_back_steps(tmp_path: Path) -> None:
    stage = Stage()
    fit(stage, [TensorBoard(tmp_path, every=1)], [{"loss": 1.0}, {"loss": 1.0}])
    stage.num_steps, stage.resumed = 3, "resumed at epoch 1, batch 1"
    fit(stage, [TensorBoard(tmp_path, every=1)], [{"loss": 2.0}], first=1, steps=2)
    read = scalars(tmp_path / "train")
    assert read["batch_loss"] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]
    assert read["epoch_loss"] == [(0, 1.0), (1, 1.0), (1, 2.0)]


def test_two_fits_write_two_files(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    fit(Stage(), [board], EPOCHS)
    fit(Stage(), [board], EPOCHS)
    assert len(list((tmp_path / "train").iterdir())) == 2


def test_tensorflow_stays_away(tmp_path: Path) -> None:
    """TensorBoard's own writer imports TensorFlow where it is installed."""
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise SystemExit('imported')")
    script = (
        "from lockstep.callbacks.tensorboard_events import Events; from pathlib import Path; "
        "events = Events(Path('run')); events.scalars(0, {'a': 1.0}); events.restart(0); events.close()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


def test_without_tensorboard_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("tensorboard"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtra) as caught:
        fit(Stage(), [TensorBoard(tmp_path)], EPOCHS)
    assert str(caught.value) == 'Event files need tensorboard. Install it: pip install "lockstep-train[tensorboard]"'


@pytest.mark.parametrize(
    ("every", "message"),
    [
        ("step", "every is 'epoch' or a number of steps. Got 'step'. Use every=100."),
        (0, "every is a whole number, 1 or more. Got 0. Use every=1."),
    ],
)
def test_errors(every: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CallbackError) as caught:
        TensorBoard(tmp_path, every)
    assert str(caught.value) == message
