"""Event files, read back with TensorBoard's own reader."""

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks.fake_trainer import FakeTrainer, fit
from lockstep.callbacks import TensorBoard
from lockstep.errors import CallbackError, MissingExtra

EPOCHS = [{"loss": 4.0, "accuracy": 0.25, "val_loss": 5.0}, {"loss": 2.0, "accuracy": 0.5, "val_loss": 3.0}]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every tag's steps and values."""
    read = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_epochs_are_written_as_keras_names_them(tmp_path: Path) -> None:
    fit(FakeTrainer((0.5, 0.25)), [TensorBoard(tmp_path)], EPOCHS)
    assert scalars(tmp_path / "train") == {
        "epoch_loss": [(0, 4.0), (1, 2.0)],
        "epoch_accuracy": [(0, 0.25), (1, 0.5)],
        "epoch_learning_rate": [(0, 0.5), (1, 0.5)],
        "epoch_learning_rate_1": [(0, 0.25), (1, 0.25)],
    }
    assert scalars(tmp_path / "validation") == {"epoch_loss": [(0, 5.0), (1, 3.0)]}


def test_steps_are_written_if_every_is_given(tmp_path: Path) -> None:
    fit(FakeTrainer((0.5,)), [TensorBoard(tmp_path, every=2)], [{"loss": 4.0}, {"loss": 2.0}], steps=3)
    assert scalars(tmp_path / "train") == {
        "batch_loss": [(2, 4.0), (4, 2.0), (6, 2.0)],
        "batch_learning_rate": [(2, 0.5), (4, 0.5), (6, 0.5)],
        "epoch_loss": [(0, 4.0), (1, 2.0)],
        "epoch_learning_rate": [(0, 0.5), (1, 0.5)],
    }
    assert not (tmp_path / "validation").exists()  # there was none


def test_an_epoch_can_be_read_when_it_ends(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.set_trainer(FakeTrainer())
    board.on_train_begin()
    board.on_epoch_begin(0)
    board.on_epoch_end(0, {"loss": 4.0})
    try:
        assert scalars(tmp_path / "train")["epoch_loss"] == [(0, 4.0)]
    finally:
        board.close()
        board.close()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_resumed_run_removes_the_epochs_it_repeats(lost: int, tmp_path: Path) -> None:
    values = [{"loss": float(epoch), "val_loss": float(epoch)} for epoch in range(5)]
    trainer = FakeTrainer()
    fit(trainer, [TensorBoard(tmp_path)], values[: 2 + lost])  # crashed here
    trainer.num_steps, trainer.resumed = 4, "resumed at epoch 2"
    fit(trainer, [TensorBoard(tmp_path)], values[2:], first=2)
    for run in ("train", "validation"):
        assert scalars(tmp_path / run)["epoch_loss"] == [(epoch, float(epoch)) for epoch in range(5)]


def test_a_resumed_run_removes_the_steps_it_repeats(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    fit(trainer, [TensorBoard(tmp_path, every=1)], [{"loss": 1.0}, {"loss": 1.0}])
    trainer.num_steps, trainer.resumed = 3, "resumed at epoch 1, batch 1"
    fit(trainer, [TensorBoard(tmp_path, every=1)], [{"loss": 2.0}], first=1, steps=2)
    read = scalars(tmp_path / "train")
    assert read["batch_loss"] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]
    assert read["epoch_loss"] == [(0, 1.0), (1, 1.0), (1, 2.0)]


def test_two_fits_write_two_files(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    fit(FakeTrainer(), [board], EPOCHS)
    fit(FakeTrainer(), [board], EPOCHS)
    assert len(list((tmp_path / "train").iterdir())) == 2


def test_tensorflow_is_not_imported(tmp_path: Path) -> None:
    """TensorBoard's own writer imports TensorFlow where it is installed."""
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise SystemExit('imported')")
    script = (
        "from lockstep.callbacks.tensorboard import EventFile; from pathlib import Path; "
        "events = EventFile(Path('run')); events.write_scalars(0, {'a': 1.0}); events.restart(0); events.close()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


def test_training_without_tensorboard_raises_at_the_beginning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("tensorboard"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtra) as caught:
        fit(FakeTrainer(), [TensorBoard(tmp_path)], EPOCHS)
    assert str(caught.value) == (
        "TensorBoard needs the package tensorboard, which is not installed. "
        'Run: pip install "lockstep-train[tensorboard]"'
    )


@pytest.mark.parametrize(
    ("every", "message"),
    [
        ("step", "every must be 'epoch' or a number of steps. Got 'step'. Use for example every=100."),
        (0, "every must be an integer, 1 or more. Got 0. Use for example every=1."),
    ],
)
def test_errors(every: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CallbackError) as caught:
        TensorBoard(tmp_path, every)
    assert str(caught.value) == message
