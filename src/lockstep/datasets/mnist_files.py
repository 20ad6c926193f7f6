"""Loads MNIST from the files that Keras or torchvision have downloaded, from the cache, or else from a mirror.

Two forms are known: Keras's `mnist.npz`, and the four gzipped idx files, which torchvision keeps. The checksums are
those of the files as they are published. A file with a wrong checksum is treated as missing.
"""

import gzip
import hashlib
import http.client
import io
import urllib.request
from os import PathLike
from pathlib import Path

import numpy as np

from lockstep.core.arguments import check_path
from lockstep.core.atomic_file import replace_file
from lockstep.datasets.fashion import MAX_BYTES, TIMEOUT_SECONDS, Images, parse_idx
from lockstep.errors import DatasetError
from lockstep.launch.environment import find_cache_home

NPZ = "mnist.npz"
MIRRORS = ("https://storage.googleapis.com/tensorflow/tf-keras-datasets",)
SHA256 = {
    NPZ: "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1",
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}


def mnist(path: str | PathLike[str] | None = None) -> tuple[Images, Images]:
    """Returns `(x, y), (xt, yt)`: 60,000 and 10,000 grey images of 28×28 pixels, uint8, and their digits, int64.

    `path` is Keras's file `mnist.npz`, or a folder with the four gzipped idx files. If it is left out, these places are
    searched, and a mirror is asked last: `~/.keras/datasets/mnist.npz`, `data/MNIST/raw` and `MNIST/raw` in the current
    folder, where torchvision puts its files, and the cache.

    Origin: Y. LeCun, C. Cortes and C. J. C. Burges, http://yann.lecun.com/exdb/mnist.

    >>> (x, y), (xt, yt) = mnist()  # doctest: +SKIP
    >>> x.shape, y.shape, xt.shape, yt.shape  # doctest: +SKIP
    ((60000, 28, 28), (60000,), (10000, 28, 28), (10000,))
    """
    cached = find_cache_home() / "lockstep" / "mnist" / NPZ
    if path is None:
        places = [Path.home() / ".keras" / "datasets" / NPZ, Path("data/MNIST/raw"), Path("MNIST/raw"), cached]
    else:
        places = [Path(check_path("path", path, DatasetError, NPZ))]
    failures = []
    for place in places:
        try:
            return _load_folder(place) if place.is_dir() else _load_npz(_check(NPZ, place.read_bytes()))
        except OSError as error:
            failures.append(f"{place}: {error}")
    for mirror in MIRRORS if path is None else ():
        url = f"{mirror}/{NPZ}"
        try:
            return _load_npz(_download(url, cached))
        except (OSError, http.client.HTTPException) as error:
            failures.append(f"{url}: {error}")
    raise DatasetError(
        "MNIST was not found:\n  "
        + "\n  ".join(failures)
        + f"\nGive a copy of Keras's file, mnist(path={NPZ!r}), or a folder with the four .gz files, "
        "mnist(path='data/MNIST/raw'). Or use lockstep.datasets.fashion_mnist(), which has the same shapes."
    )


def _load_npz(content: bytes) -> tuple[Images, Images]:
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        x, y, xt, yt = (arrays[name] for name in ("x_train", "y_train", "x_test", "y_test"))
    return (x, y.astype(np.int64)), (xt, yt.astype(np.int64))


def _load_folder(folder: Path) -> tuple[Images, Images]:
    def load(name: str, num_axes: int) -> np.ndarray:
        return parse_idx(gzip.decompress(_check(name, (folder / name).read_bytes())), num_axes=num_axes)

    train, test = (
        (load(f"{part}-images-idx3-ubyte.gz", 3), load(f"{part}-labels-idx1-ubyte.gz", 1).astype(np.int64))
        for part in ("train", "t10k")
    )
    return train, test


def _check(name: str, content: bytes) -> bytes:
    """Returns the content of a file of MNIST; raises DatasetError if its checksum is wrong."""
    if (sha256 := hashlib.sha256(content).hexdigest()) != SHA256[name]:
        raise DatasetError(
            f"The sha256 of {name!r} must be {SHA256[name]}. Got {sha256}. Use another copy of the file."
        )
    return content


def _download(url: str, target: Path) -> bytes:
    """Downloads the file of Keras, stores it in the cache, and returns its content."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
        content = _check(NPZ, response.read(MAX_BYTES + 1))
    replace_file(target, content)
    return content
