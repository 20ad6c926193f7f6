"""A run's numbers: kept in line, told in one line, written and drawn."""

import builtins
import csv
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.callbacks import History
from lockstep.callbacks import history as history_module
from lockstep.display.curve_pictures import draw, group_panels
from lockstep.errors import MissingExtra


def trained(num_epochs: int, devices: tuple[str, ...] = ("cpu:0",), /, **values: float) -> History:
    """A history in which every epoch had the same values and took 9.2 seconds."""
    history = History(devices=devices)
    for epoch in range(num_epochs):
        history.record(epoch, values, seconds=9.2)
    return history


def test_record_keeps_keras_names_and_plain_floats() -> None:
    history = History(devices=("cpu:0",))
    history.record(0, {"loss": np.float64(0.5), "val_loss": np.float64(0.75)}, seconds=1.0)
    assert history.history == {"loss": [0.5], "val_loss": [0.75]}
    assert {type(value) for column in history.history.values() for value in column} == {float}
    assert (history.epoch, history.seconds) == ([0], [1.0])


def test_columns_have_one_length_if_a_name_comes_late_or_is_missing() -> None:
    history = History()
    history.record(0, {"loss": 0.5}, seconds=1.0)
    history.record(1, {"loss": 0.4, "val_loss": 0.6}, seconds=1.0)
    history.record(2, {"loss": 0.3}, seconds=1.0)
    assert history.history["loss"] == [0.5, 0.4, 0.3]
    assert [math.isnan(value) for value in history.history["val_loss"]] == [True, False, True]
    assert history.summarize() == "val loss: 0.6000, 1.0 sec/epoch"  # the newest that was measured


@pytest.mark.parametrize(
    ("devices", "where"),
    [
        ((), ""),
        (("cpu:0",), " on 1 device: cpu:0"),
        (("cpu:0", "cpu:1"), " on 2 devices: cpu:0, cpu:1"),
        (("cuda:0", "cuda:0"), " on 2 devices: cuda:0, cuda:0"),  # two replicas on one chip
        (("cpu:0", "cpu:1", "cpu:2"), " on 3 devices: cpu:0 … cpu:2"),
        (("cpu:0", "cpu:1", "cpu:2", "cpu:3"), " on 4 devices: cpu:0 … cpu:3"),
    ],
)
def test_the_summary_names_the_devices(devices: tuple[str, ...], where: str) -> None:
    assert trained(2, devices, val_accuracy=0.93).summarize() == f"val acc: 0.93, 9.2 sec/epoch{where}"
    assert History(devices=devices).summarize() == f"no epoch finished{where}"


@pytest.mark.parametrize(
    ("values", "result"),
    [
        ({"loss": 0.3, "accuracy": 0.9, "val_loss": 0.4, "val_accuracy": 0.926}, "val acc: 0.93"),
        ({"loss": 0.3, "accuracy": 0.9}, "train acc: 0.90"),
        ({"loss": 0.3, "mae": 2.0}, "loss: 0.3000"),
        ({"loss": 0.3, "val_loss": 0.41237}, "val loss: 0.4124"),
        ({}, "2 epochs"),
    ],
)
def test_the_summary_has_the_best_substitute_for_validation_accuracy(values: dict[str, float], result: str) -> None:
    assert trained(2, **values).summarize() == f"{result}, 9.2 sec/epoch on 1 device: cpu:0"


def test_the_summary_has_the_mean_time() -> None:
    history = History()
    for epoch, seconds in enumerate((0.02, 0.03, 0.04)):
        history.record(epoch, {"loss": 1.0}, seconds)
    assert history.summarize() == "loss: 1.000, 0.03 sec/epoch"


def test_repr_is_short() -> None:
    assert repr(History()) == "History(0 epochs)"
    assert repr(trained(1, loss=0.5)) == "History(1 epoch: loss 0.5000)"
    assert repr(trained(2, loss=0.5, accuracy=0.9)) == "History(2 epochs: loss 0.5000, accuracy 0.9000)"


def test_csv_keeps_every_digit(tmp_path: Path) -> None:
    history = History()
    history.record(0, {"loss": 0.1 + 0.2}, seconds=1.25)
    history.record(1, {"loss": 1 / 3, "val_loss": 2 / 3}, seconds=1.5)
    path = history.to_csv(tmp_path / "new folder" / "run.csv")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == history.epoch
    for name, column in history.history.items():
        np.testing.assert_array_equal([float(row[name]) for row in rows], column)


def test_a_saved_history_continues_with_every_digit() -> None:
    whole, first, second = History(("cpu:0",)), History(("cpu:0",)), History(("cpu:0", "cpu:1"))
    epochs = [{"loss": 0.1 + 0.2}, {"loss": 1 / 3, "val_loss": 5e-324}, {"loss": math.nan}, {"val_loss": math.inf}]
    for epoch, logs in enumerate(epochs):
        whole.record(epoch, logs, seconds=1 / 7)
        (first if epoch < 2 else second).record(epoch, logs, seconds=1 / 7)
        if epoch == 1:
            saved = first.state_dict()
            first.record(9, {"late": 1.0}, seconds=1.0)  # what is saved does not change
            second.load_state_dict(saved)
    assert repr(second.state_dict()) == repr(whole.state_dict())
    assert second.devices == ("cpu:0", "cpu:1")
    assert "late" not in saved["history"]
    assert saved["epoch"] == [0, 1]


def png_size(path: Path) -> tuple[int, int]:
    """Width and height from a PNG's header."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.parametrize("num_epochs", [0, 1, 2, 10, 200])
def test_plot_writes_a_picture_with_a_panel_for_loss_and_one_for_accuracy(tmp_path: Path, num_epochs: int) -> None:
    history = trained(num_epochs, loss=0.5, accuracy=0.9, val_loss=0.6, val_accuracy=0.8)
    width, height = png_size(history.plot(tmp_path / "curves.png"))
    assert width == (1248 if num_epochs else 624)
    assert height == 468


def test_plot_of_loss_alone_is_one_panel(tmp_path: Path) -> None:
    assert png_size(trained(3, loss=0.5).plot(tmp_path / "curves.png")) == (624, 468)


def test_plot_adds_the_ending_and_the_folder(tmp_path: Path) -> None:
    path = trained(1, loss=0.5).plot(tmp_path / "pictures" / "curves")
    assert path == tmp_path / "pictures" / "curves.png"
    png_size(path)
    assert trained(1, loss=0.5).plot(str(tmp_path / "curves.svg")).read_text().startswith("<?xml")


def test_plot_leaves_out_values_that_are_not_finite(tmp_path: Path) -> None:
    history = History()
    for epoch, loss in enumerate((0.5, math.inf, math.nan)):
        history.record(epoch, {"loss": loss, "accuracy": math.nan}, seconds=1.0)
    png_size(history.plot(tmp_path / "curves.png"))


def test_a_panel_has_integer_epochs_a_legend_and_both_lines() -> None:
    epochs = list(range(10))
    curves = {"loss": [1 / (epoch + 1) for epoch in epochs], "val_loss": [2 / (epoch + 1) for epoch in epochs]}
    (axes,) = draw(epochs, curves).axes
    assert [np.asarray(line.get_xdata()).tolist() for line in axes.lines] == [list(range(1, 11))] * 2
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["train", "validation"]
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert axes.get_xlabel() == "epoch"


def test_the_axis_has_no_epoch_0_and_full_names() -> None:
    names = [prefix + name for prefix in ("", "val_") for name in ("loss", "a", "b", "c", "d")]
    figure = draw(list(range(30)), {name: [0.5] * 30 for name in names})
    figure.draw_without_rendering()
    loss, metrics = figure.axes
    assert all(axes.get_xlim()[0] >= 0.5 for axes in (loss, metrics))
    legend = metrics.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()][:2] == ["a, train", "a, validation"]
    # Eight names do not fit between the lines: they stand beside the panel, inside the picture.
    box, panel = legend.get_window_extent(), metrics.get_window_extent()
    assert panel.x1 <= box.x0 < box.x1 <= figure.bbox.x1


@pytest.mark.parametrize(("num_panels", "shape"), [(1, (1, 1)), (3, (1, 3)), (4, (2, 2)), (5, (2, 3)), (7, (3, 3))])
def test_panels_fill_their_rows(num_panels: int, shape: tuple[int, int]) -> None:
    figure = draw([0], {f"m{index}": [2.0] for index in range(num_panels)})
    spec = figure.axes[0].get_subplotspec()
    assert spec is not None
    assert len(figure.axes) == num_panels
    assert spec.get_geometry()[:2] == shape


def test_one_epoch_is_one_tick() -> None:
    (axes,) = draw([4], {"loss": [0.5]}).axes
    assert list(axes.get_xticks()) == [5]


@pytest.mark.parametrize(
    ("curves", "expected"),
    [
        ({}, {}),
        ({"loss": [1.0]}, {"loss": ["loss"]}),
        ({"loss": [0.1], "accuracy": [0.9]}, {"loss": ["loss"], "accuracy": ["accuracy"]}),
        ({"accuracy": [0.9], "val_top5": [0.9]}, {"metrics": ["accuracy", "top5"]}),
        ({"accuracy": [0.9], "mae": [12.0]}, {"accuracy": ["accuracy"], "mae": ["mae"]}),
        # Flat at the bottom of a scale up to 1: a panel of its own.
        ({"accuracy": [0.9], "learning_rate": [0.001]}, {"accuracy": ["accuracy"], "learning_rate": ["learning_rate"]}),
        # Only validation left the scale.
        ({"mse": [0.5], "val_mse": [3.0], "top5": [0.5]}, {"mse": ["mse"], "top5": ["top5"]}),
    ],
)
def test_metrics_on_one_scale_share_a_panel(curves: dict[str, list[float]], expected: dict[str, list[str]]) -> None:
    assert group_panels(curves) == expected


def test_plot_without_matplotlib_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtra, match=r'pip install "lockstep-train\[plot\]"'):
        trained(1, loss=0.5).plot(tmp_path / "curves.png")
    assert not list(tmp_path.iterdir())


def test_a_plot_without_a_path_is_shown_in_a_notebook_and_written_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = trained(2, loss=0.5)
    monkeypatch.chdir(tmp_path)
    assert history.plot() == Path("curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    shown: list[bytes] = []
    monkeypatch.setattr(history_module, "in_notebook", lambda: True)
    monkeypatch.setattr(history_module, "show_picture", shown.append)
    assert history.plot() is None
    assert [picture[:4] for picture in shown] == [b"\x89PNG"]
