"""One row per epoch, in a file that is whole at any moment and goes on after a resume."""

import math
from pathlib import Path
from typing import Any

import pytest

from callbacks.fake_trainer import FakeTrainer, epochs, fit
from lockstep.callbacks import CSVLogger
from lockstep.errors import CallbackError

LOSSES = epochs("loss", [0.1 + 0.2, 1 / 3, 5e-324, 4.0])
ROWS = ["epoch,loss", "0,0.30000000000000004", "1,0.3333333333333333", "2,5e-324", "3,4.0"]


def lines(path: Path) -> list[str]:
    text = path.read_text()
    assert text.endswith("\n")
    return text.splitlines()


def test_a_row_is_written_when_its_epoch_ends(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "log.csv"
    logger = CSVLogger(path)
    logger.on_train_begin()
    for epoch, logs in enumerate(LOSSES):
        logger.on_epoch_begin(epoch)
        assert lines(path) == (ROWS[: epoch + 1] if epoch else ["epoch"])
        logger.on_epoch_end(epoch, logs)
        assert lines(path) == ROWS[: epoch + 2]
    assert [entry.name for entry in path.parent.iterdir()] == ["log.csv"]


@pytest.mark.parametrize(
    ("append", "expected"), [(True, ["epoch,loss", "0,1.0", "1,2.0", "0,3.0"]), (False, ["epoch,loss", "0,3.0"])]
)
def test_a_second_fit_appends_or_replaces(append: bool, expected: list[str], tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    logger = CSVLogger(path, append)
    fit(FakeTrainer(), [logger], epochs("loss", [1, 2]))
    fit(FakeTrainer(), [logger], epochs("loss", [3]))
    assert lines(path) == expected


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("cut", range(4))
def test_a_resumed_run_repeats_and_loses_no_row(cut: int, lost: int, append: bool, tmp_path: Path) -> None:
    """The checkpoint is that of `cut` epochs; `lost` more were made, logged, and are made again."""
    path = tmp_path / "log.csv"
    path.write_text("epoch,loss\n0,7.5\n1,8.5\n")  # another run's
    trainer = FakeTrainer()
    saved = fit(trainer, [CSVLogger(path, append)], LOSSES[:cut])
    if cut == 0:
        saved = [{"name": "CSVLogger", "state": {"rows_before": 2 if append else 0}}]
    fit(FakeTrainer(), [CSVLogger(path, append)], LOSSES[cut : cut + lost], first=cut, state=saved)
    fit(trainer, [CSVLogger(path, append)], LOSSES[cut:], first=cut, state=saved)
    before = ["0,7.5", "1,8.5"] if append else []
    assert lines(path) == [ROWS[0], *before, *ROWS[1:]]


@pytest.mark.parametrize(
    "left",
    [
        "",  # nothing at all
        "epoch,loss\n0,0.30000000000000004\n",
        "epoch,loss\n0,0.30000000000000004\n1,0.333",  # cut off in the middle of a number
        "epoch,lo",
    ],
)
def test_rows_that_the_file_has_lost_come_from_the_history(left: str, tmp_path: Path) -> None:
    path, trainer = tmp_path / "log.csv", FakeTrainer()
    saved = fit(trainer, [CSVLogger(path)], LOSSES[:2])
    path.write_text(left)
    fit(trainer, [CSVLogger(path)], LOSSES[2:], first=2, state=saved)
    assert lines(path) == ROWS
    path.unlink()
    fit(trainer, [CSVLogger(path)], [], first=4, state=saved)  # a run that was over: nothing to write
    assert not path.exists()


def test_new_columns_appear_and_missing_values_are_empty(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    values = [{"loss": 1.0}, {"loss": 2.0, "val_loss": 3.0}, {"val_loss": 4.0}, {"loss": math.nan, "a,b": math.inf}]
    fit(FakeTrainer(), [CSVLogger(path)], values)
    assert lines(path) == ['epoch,loss,val_loss,"a,b"', "0,1.0,,", "1,2.0,3.0,", "2,,4.0,", "3,nan,,inf"]
    fit(FakeTrainer(), [CSVLogger(path)], [{"accuracy": 0.5}])
    assert lines(path)[0] == 'epoch,loss,val_loss,"a,b",accuracy'
    assert lines(path)[-2:] == ["3,nan,,inf,", "0,,,,0.5"]


def test_a_file_without_an_epoch_column_raises(tmp_path: Path) -> None:
    path = tmp_path / "notes.csv"
    path.write_text("name,age\nAda,36\n")
    with pytest.raises(CallbackError) as caught:
        fit(FakeTrainer(), [CSVLogger(path)], LOSSES)
    assert str(caught.value) == (
        f"CSVLogger cannot append to {path}, because the file has no column 'epoch': it begins with 'name,age'. Use "
        "another path, or append=False."
    )
    assert path.read_text() == "name,age\nAda,36\n"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.csv"
    fit(FakeTrainer(), [CSVLogger(path)], LOSSES[:1])

    def fail(*arguments: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        fit(FakeTrainer(), [CSVLogger(path)], [{"accuracy": 0.5}])
    assert lines(path) == ROWS[:2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.csv"]
