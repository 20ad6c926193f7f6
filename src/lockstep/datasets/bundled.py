"""The data set of handwritten digits, which is part of the package, so that a demo needs no network."""

from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

NUM_TRAIN = 1500

Digits = tuple[NDArray[np.float32], NDArray[np.int64]]


def digits() -> tuple[Digits, Digits]:
    """Returns `(x, y), (xt, yt)`: 1,797 handwritten digits of 8×8 pixels, 1,500 to train and 297 to test.

    Each row of `x` is an image in [0, 1], float32; `y` holds the digits, int64. The images are in the order of
    `numpy.random.RandomState(0).permutation(1797)`, which numpy promises not to change; the first 1,500 train.

    Origin: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
    1998, https://doi.org/10.24432/C50P49, licence CC BY 4.0; its test set, as in scikit-learn's `load_digits`.

    >>> (x, y), (xt, yt) = digits()
    >>> x.shape, y.shape, xt.shape, yt.shape
    ((1500, 64), (1500,), (297, 64), (297,))
    """
    with files("lockstep.datasets").joinpath("digits.npz").open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        pixels, labels = arrays["images"], arrays["labels"]  # (1797, 64) in 0..16 and (1797,), both uint8
    order = np.random.RandomState(0).permutation(len(labels))
    x = pixels[order].astype(np.float32) / np.float32(16)
    y = labels[order].astype(np.int64)
    return (x[:NUM_TRAIN], y[:NUM_TRAIN]), (x[NUM_TRAIN:], y[NUM_TRAIN:])
