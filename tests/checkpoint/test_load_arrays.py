"""The arrays of a checkpoint for whoever has no framework."""

import ml_dtypes
import numpy as np
import pytest

from checkpoint.samples import same, snapshot
from lockstep.checkpoint import CheckpointFolder, Snapshot, load_arrays, write
from lockstep.core.types import Array
from lockstep.errors import CheckpointError, StateError


def test_arrays_are_loaded_by_name(tmp_path):
    found = load_arrays(write(tmp_path / "mine", snapshot(3)))
    assert list(found) == [
        *("layer.weight", "layer.bias", "count"),
        *("optimizer.layer.weight.exp_avg", "optimizer.layer.weight.step", "optimizer.layer.weight.beta"),
        *("buffers.empty", "loss.phase"),
    ]
    assert same(found["layer.weight"], snapshot(3).state["model.layer.weight"].data)
    assert same(found["layer.bias"], np.array([1.5, np.array(-65536, "int32").view("float32")], "float32"))
    assert same(found["optimizer.layer.weight.step"], np.asarray(7))
    assert found["loss.phase"] == [1 + 2j]


def test_a_bfloat16_scalar_is_loaded_as_float32(tmp_path):
    path = write(tmp_path / "mine", Snapshot({"model.w": Array(np.asarray(1.5, ml_dtypes.bfloat16), "bfloat16")}))
    assert same(load_arrays(path)["w"], np.asarray(1.5, "float32"))


def test_the_newest_checkpoint_of_a_store_is_loaded(tmp_path):
    store = CheckpointFolder(tmp_path, best="val_loss")
    for step in (1, 2):
        store.save(snapshot(step), step)
    assert load_arrays(str(tmp_path))["count"] == 2
    assert load_arrays(tmp_path / "best")["count"] == 2
    assert load_arrays(store.path(1))["count"] == 1


def test_an_empty_folder_raises(tmp_path):
    with pytest.raises(CheckpointError, match=r"manifest\.json: No such file"):
        load_arrays(tmp_path)


def test_two_arrays_of_one_name_raise(tmp_path):
    state = {name: Array(np.zeros(1), "float64") for name in ("model.optimizer.w", "optimizer.w")}
    with pytest.raises(StateError, match=r"Two arrays of .*mine have the name 'optimizer\.w'"):
        load_arrays(write(tmp_path / "mine", Snapshot(state)))
