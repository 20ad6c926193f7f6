import gzip
import hashlib
import io
import struct

import numpy as np
import pytest

from lockstep.datasets import mnist, mnist_files
from lockstep.errors import DatasetError

X, Y = np.arange(3 * 4 * 4, dtype=np.uint8).reshape(3, 4, 4), np.array([7, 0, 9], np.uint8)
XT, YT = np.full((2, 4, 4), 255, np.uint8), np.array([1, 2], np.uint8)


def pack_idx(array):
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes())


def pack_npz():
    file = io.BytesIO()
    np.savez(file, x_train=X, y_train=Y, x_test=XT, y_test=YT)
    return file.getvalue()


FILES = {name: pack_idx(array) for name, array in zip(list(mnist_files.SHA256)[1:], (X, Y, XT, YT), strict=True)}
FILES["mnist.npz"] = pack_npz()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that is the current one, the home and the cache, beside a mirror; the files are tiny."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(mnist_files, "find_cache_home", lambda: tmp_path / "cache")
    monkeypatch.setattr(mnist_files, "MIRRORS", ((tmp_path / "mirror").as_uri(),))
    sha256 = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    monkeypatch.setattr(mnist_files, "SHA256", sha256)
    return tmp_path


def put(folder, *names):
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(FILES[name])


def check(train, test):
    for got, expected in zip((*train, *test), (X, Y, XT, YT), strict=True):
        assert np.array_equal(got, expected)
    assert train[0].dtype == test[0].dtype == np.uint8
    assert train[1].dtype == test[1].dtype == np.int64


@pytest.mark.parametrize("place", [".keras/datasets", "data/MNIST/raw", "MNIST/raw", "cache/lockstep/mnist", "mirror"])
def test_is_read_from_the_place_that_has_it(folder, place):
    put(folder / place, *(FILES if "raw" in place else ["mnist.npz"]))
    check(*mnist())
    assert (folder / "cache/lockstep/mnist/mnist.npz").exists() == (place in ("cache/lockstep/mnist", "mirror"))


def test_a_file_or_a_folder_is_given(folder):
    put(folder / "mine", *FILES)
    check(*mnist("mine/mnist.npz"))
    check(*mnist(folder / "mine"))


def test_the_error_names_every_place_and_a_way_out(folder):
    put(folder / ".keras/datasets")
    (folder / ".keras/datasets/mnist.npz").write_bytes(b"damaged")
    with pytest.raises(DatasetError, match=r"(?s)mnist.npz: The sha256 of 'mnist.npz' must be .* MNIST/raw: .*mirror"):
        mnist()
    with pytest.raises(DatasetError, match=r"(?s)MNIST was not found:\n  gone.npz: .*Give a copy of Keras's file"):
        mnist("gone.npz")
