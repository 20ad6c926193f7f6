"""Whether a saved state fits: what counts as a difference, and how the message lists the differences."""

import re

import numpy as np
import pytest

from lockstep.core.state import ArraySpec, check_state, check_versions
from lockstep.core.types import Array
from lockstep.errors import ExactError, StateError

STATE = {
    "model.weight": Array(np.zeros((64, 32), "float32"), "float32"),
    "buffers.scale": Array(np.zeros((), "int16"), "bfloat16"),  # the bytes of bfloat16 as numpy holds them
    "optimizer.weight.momentum": Array(np.zeros((64, 32), "float32"), "float32"),
    "optimizer.steps": Array(np.asarray(3), "python"),
}
OWN = {name: ArraySpec.from_array(array) for name, array in STATE.items()}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"model.weight": ArraySpec((None, 32), "float32")},  # a size that the first batch tells
        {"model.weight": ArraySpec((None, None), "float32")},
    ],
)
def test_what_fits(changed):
    check_state(STATE, OWN | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"model.weight": ArraySpec((64, 48), "float32")},
            "model: 'weight' is (64, 32) in the checkpoint and (64, 48) in the model. Load a checkpoint of this model.",
        ),
        ({"model.weight": ArraySpec((None, 48), "float32")}, "model: 'weight' is (64, 32) in the checkpoint and (None"),
        ({"model.weight": ArraySpec((64,), "float32")}, "model: 'weight' is (64, 32) in the checkpoint and (64,) in"),
        ({"buffers.scale": ArraySpec((), "int16")}, "model: 'buffers.scale' is bfloat16 in the checkpoint and int16"),
        (
            {"model.weight": ArraySpec((64, 48), "float64")},
            "model: 'weight' is (64, 32) of float32 in the checkpoint and (64, 48) of float64 in the model.",
        ),
        ({"model.bias": ArraySpec((64,), "float32")}, "model: 'bias' is missing from the checkpoint. Load"),
        (
            {"optimizer.steps": ArraySpec((), "int64")},
            "optimizer: 'steps' is python in the checkpoint and int64 in the optimizer. Use the optimizer that the "
            "checkpoint was saved with.",
        ),
        (
            {"optimizer.steps": ArraySpec((), "int64"), "model.bias": ArraySpec((64,), "float32")},
            "model: 'bias' is missing from the checkpoint. Load a checkpoint of this model.",  # the model comes first
        ),
        (
            {f"model.{index}": ArraySpec((), "float32") for index in range(5)},
            "model: '0' is missing from the checkpoint; '1' is missing from the checkpoint; '2' is missing from the "
            "checkpoint; 2 more. Load",
        ),
    ],
)
def test_what_differs(changed, message):
    with pytest.raises(StateError) as raised:
        check_state(STATE, OWN | changed)
    assert str(raised.value).startswith(f"The checkpoint does not fit this {message}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.weight", "model: 'weight' is not in the model."),
        ("buffers.scale", "model: 'buffers.scale' is not in the model."),
        ("optimizer.weight.momentum", "optimizer: 'weight.momentum' is not in the optimizer."),
    ],
)
def test_what_only_the_checkpoint_has(name, message):
    with pytest.raises(StateError, match=f"^The checkpoint does not fit this {message}"):
        check_state(STATE, {key: spec for key, spec in OWN.items() if key != name})


H200 = {"device": "cuda", "bits": 2, "torch": "2.8.0", "device model": "NVIDIA H200", "CUDA": "12.8", "cuDNN": "91002"}
CPU = {"device": "cpu", "bits": 2, "torch": "2.8.0"}


def test_the_same_versions_give_the_same_bits():
    check_versions(H200, dict(H200))
    check_versions(CPU, dict(CPU))


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (H200 | {"device model": "NVIDIA A100"}, "saved with device model NVIDIA A100, and this run has device model "),
        (
            H200 | {"CUDA": "12.4"},
            "saved with CUDA 12.4, and this run has CUDA 12.8, so its results may differ in some bits. Use ",
        ),
        (
            H200 | {"cuDNN": "90100"},
            "saved with cuDNN 90100, and this run has cuDNN 91002, so its results may differ in some bits.",
        ),
        (
            H200 | {"torch": "2.7.0"},
            "saved with torch 2.7.0, and this run has torch 2.8.0, so its results may differ in some bits.",
        ),
        (H200 | {"bits": 1}, "saved with Lockstep arithmetic 1, and this run has Lockstep arithmetic 2, so its"),
        (
            CPU,
            (
                "saved with device type cpu, and this run has device type cuda, so its results may differ in some "
                "bits. Use the same"
            ),
        ),
        (
            H200 | {"oneDNN": "on"},
            "saved with oneDNN on, and this run has no oneDNN, so its results may differ in some bits.",
        ),
    ],
)
def test_other_versions_are_refused(saved, message):
    with pytest.raises(ExactError) as raised:
        check_versions(saved, H200)
    assert str(raised.value).startswith(f"The checkpoint was {message}")
    end = r"Use the same [\w ]+, or exact=False to continue without bit-identical results\.$"
    assert re.search(end, str(raised.value))


def test_an_older_checkpoint_that_does_not_say_is_refused_with_the_reason():
    older = {name: value for name, value in H200.items() if name != "device model"}
    with pytest.raises(ExactError) as raised:
        check_versions(older, H200)
    assert str(raised.value) == (
        "The checkpoint does not say with which device model it was saved, because an older version of "
        "Lockstep wrote it. This run has device model NVIDIA H200, so its results may differ in some bits. "
        "Use exact=False to continue without bit-identical results."
    )
