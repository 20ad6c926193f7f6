import hashlib

import numpy as np

from lockstep.datasets import digits


def test_shapes_types_and_range():
    (x, y), (xt, yt) = digits()
    assert x.shape == (1500, 64)
    assert xt.shape == (297, 64)
    assert x.dtype == xt.dtype == np.float32
    assert y.dtype == yt.dtype == np.int64
    assert x.min() == 0.0
    assert x.max() == 1.0


def test_both_parts_have_every_digit():
    (_, y), (_, yt) = digits()
    assert np.bincount(y).tolist() == [151, 157, 142, 155, 143, 157, 151, 148, 151, 145]
    assert np.bincount(yt).tolist() == [27, 25, 35, 28, 38, 25, 30, 31, 23, 35]


def test_the_split_is_fixed():
    (x, y), (xt, yt) = digits()
    content = b"".join(array.tobytes() for array in (x, y, xt, yt))
    assert hashlib.sha256(content).hexdigest() == "4489799c2e52bf12e80ddd15cb2e3bbfb36603a10743d999be5b301d9864e7e0"
