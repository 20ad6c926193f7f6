"""Short float types: exact widening, and narrowing as in PyTorch."""

import numpy as np
import pytest
import torch

from lockstep.core.low_precision import is_float, narrow, widen

EVERY = np.arange(2**16, dtype=np.uint16)
SHORT = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def tensor(bits, dtype):
    return torch.tensor(bits.view(np.int16)).view(SHORT[dtype])


def held(bits, dtype):
    """The bytes as numpy holds them in a state."""
    return bits.view(np.int16) if dtype == "bfloat16" else bits.view(np.float16)


@pytest.mark.parametrize("dtype", SHORT)
def test_every_value_widens_as_in_torch_and_narrows_back(dtype):
    wide = widen(held(EVERY, dtype), dtype)
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide, tensor(EVERY, dtype).float().numpy())
    back = narrow(wide, dtype).view(np.uint16)
    number = ~np.isnan(wide)
    np.testing.assert_array_equal(back[number], EVERY[number])
    assert np.isnan(widen(held(back, dtype), dtype)[~number]).all()


@pytest.mark.parametrize("dtype", SHORT)
def test_narrowing_rounds_as_torch_does(dtype):
    random = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    # Every place where the cut-off part is just below, at and just above one half.
    ties = (EVERY.astype(np.uint32) << 16)[:, None] + np.array([0x7FFF, 0x8000, 0x8001], np.uint32)
    values = np.concatenate([random, ties.ravel()]).view(np.float32)
    values = values[~np.isnan(values)]
    expected = torch.tensor(values).to(SHORT[dtype]).view(torch.int16).numpy()
    np.testing.assert_array_equal(narrow(values, dtype).view(np.int16), expected)


@pytest.mark.parametrize("bits", [0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0xFF800001])
def test_a_nan_stays_a_nan(bits):
    value = np.array([bits], np.uint32).view(np.float32)
    for dtype in SHORT:
        assert np.isnan(widen(narrow(value, dtype), dtype)).all()


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (1, 1, 1)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "complex64"])
def test_shapes_and_array_types_are_kept(shape, dtype):
    data = np.ones(shape, "int16" if dtype == "bfloat16" else dtype)
    wide = widen(data, dtype)
    back = narrow(wide, dtype)
    for array in (wide, back):
        assert type(array) is np.ndarray
        assert array.shape == shape
    assert back.dtype == data.dtype
    assert back.tobytes() == data.tobytes()


def test_wide_types_are_not_copied():
    data = np.ones(3, "float64")
    assert widen(data, "float64") is data
    assert narrow(data, "float64") is data


@pytest.mark.parametrize(
    ("dtype", "answer"), [("bfloat16", True), ("complex64", True), ("int64", False), ("bool", False), ("python", False)]
)
def test_is_float(dtype, answer):
    assert is_float(dtype) == answer
