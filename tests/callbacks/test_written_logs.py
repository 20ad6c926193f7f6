"""What a callback writes into its logs: for those after it, the history, and what draws and stores it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep.backends.numpy import SGD, Dense
from lockstep.callbacks import Log, Plot, TensorBoard, plot
from lockstep.callbacks.base import NO_LOGS, Callback, Logs


class Writing(Callback):
    """Writes a number and a word into the logs of an epoch."""

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        assert isinstance(logs, dict)
        logs["rate"], logs["note"] = np.float32(0.5), f"epoch {epoch}"


def fit(callbacks: list[Callback], **options: Any) -> lockstep.History:
    x, y = np.eye(8), np.arange(8) % 2
    with lockstep.wrap(Dense([8, 2], seed=1), SGD(0.5), "cross_entropy", shards=2) as trainer:
        return trainer.fit((x, y), epochs=2, callbacks=callbacks, **{"verbose": 0, **options})


def test_the_history_and_its_files_have_what_was_written(tmp_path: Path) -> None:
    history = fit([Writing()])
    assert history.history["rate"] == [0.5, 0.5]
    assert history.history["note"] == ["epoch 0", "epoch 1"]
    assert history.to_csv(tmp_path / "run.csv").read_text().splitlines()[1].endswith("0.5,epoch 0")
    assert history.plot(tmp_path / "run.png").exists()
    assert repr(history).endswith("rate 0.5000, note epoch 1)")


def test_a_picture_shows_the_last_epoch_with_what_was_written_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[dict[str, list[float]]] = []

    def draw(epochs: Any, curves: Any, axes: Any) -> Any:
        drawn.append({name: list(column) for name, column in curves.items()})
        return plot.load_figure_type()()

    monkeypatch.setattr(plot, "draw", draw)
    fit([Plot(tmp_path / "run.png", clock=lambda: 0.0), Writing()])
    assert drawn[-1]["rate"] == [0.5, 0.5]


def test_event_files_have_only_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fit([Writing(), TensorBoard(tmp_path)])
    tags = EventAccumulator(str(tmp_path / "train")).Reload().Tags()["scalars"]
    assert "epoch_rate" in tags
    assert "epoch_note" not in tags


@pytest.mark.parametrize("verbose", [1, 2])
def test_lines_and_functions_get_strings_unchanged(verbose: int, capsys: pytest.CaptureFixture[str]) -> None:
    fit([Writing(), Log(print)], verbose=verbose)
    shown = capsys.readouterr().out
    assert "'note': 'epoch 1'" in shown
    assert shown.count("epoch 1") >= 2


class Reading(Callback):
    """Writes into the logs of a step, and reads there what another wrote."""

    def __init__(self, name: str) -> None:
        self.name, self.seen = name, list[list[str]]()

    def on_train_batch_end(self, batch: int, logs: Logs = NO_LOGS) -> None:
        self.seen.append(sorted(logs))
        logs[self.name] = 1.0  # type: ignore[index]  # a Mapping to type checkers


def test_the_logs_of_a_step_are_shared_too() -> None:
    first, second = Reading("a"), Reading("b")
    history = fit([first, second])
    assert first.seen == [["loss"]] * 2
    assert second.seen == [["a", "loss"]] * 2
    assert sorted(history.history) == ["loss"]
