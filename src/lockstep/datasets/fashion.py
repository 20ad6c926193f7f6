"""Loads Fashion-MNIST from Debian's package, from the cache, or else from a mirror.

The checksums are those of the uncompressed content, because Debian compresses the same content to different files. A
file with a wrong checksum is treated as missing.

`docs/design/dependencies.md` says why the package `pooch` is not used.
"""

import gzip
import hashlib
import http.client
import io
import math
import struct
import urllib.request
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.core.atomic_file import replace_file
from lockstep.errors import DatasetError
from lockstep.launch.environment import find_cache_home

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
MIRRORS = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
)
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
TIMEOUT_SECONDS = 30
MAX_BYTES = 2**26  # the largest of the files has 47 MB when it is uncompressed
UINT8 = 0x08  # the code of the one element type that the idx files of this family have

Images = tuple[NDArray[np.uint8], NDArray[np.int64]]


def fashion_mnist() -> tuple[Images, Images]:
    """Returns `(x, y), (xt, yt)`: 60,000 and 10,000 grey images of 28×28 pixels, uint8, and their classes, int64.

    Origin: H. Xiao, K. Rasul and R. Vollgraf, Zalando Research, 2017, https://github.com/zalandoresearch/fashion-mnist,
    licence MIT.

    >>> (x, y), (xt, yt) = fashion_mnist()  # doctest: +SKIP
    >>> x.shape, y.shape, xt.shape, yt.shape  # doctest: +SKIP
    ((60000, 28, 28), (60000,), (10000, 28, 28), (10000,))
    """
    return _load_part("train"), _load_part("t10k")


def parse_idx(content: bytes, *, num_axes: int) -> NDArray[np.uint8]:
    """Returns the array in a file of the idx format, in which MNIST and similar data sets are stored.

    Raises DatasetError if the header is not valid, or if there are too few or too many bytes after it.

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]), num_axes=1)
    array([7, 8, 9], dtype=uint8)
    """
    magic = bytes([0, 0, UINT8, num_axes])
    if not content.startswith(magic):
        raise DatasetError(
            f"The file is not an idx file with {num_axes} axes: it begins with {content[:4].hex()!r} instead of "
            f"{magic.hex()!r}. Use another copy of the file."
        )
    start = 4 + 4 * num_axes
    if len(content) < start:
        raise DatasetError(
            f"The idx file is incomplete: it has {len(content)} bytes, and the header alone has {start} bytes. "
            "Use another copy of the file."
        )
    shape = struct.unpack(f">{num_axes}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise DatasetError(
            f"The idx file has {len(content) - start} bytes after its header, and its shape {shape} needs "
            f"{math.prod(shape)} bytes. Use another copy of the file."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def _load_part(name: str) -> Images:
    images = parse_idx(_find_content(f"{name}-images-idx3-ubyte"), num_axes=3)
    labels = parse_idx(_find_content(f"{name}-labels-idx1-ubyte"), num_axes=1)
    return images, labels.astype(np.int64)


def _find_content(name: str) -> bytes:
    """Returns the uncompressed content of a file of Fashion-MNIST from the first source that has it."""
    cached = find_cache_home() / "lockstep" / "fashion-mnist" / f"{name}.gz"
    failures = []
    for path in (DEBIAN / f"{name}.gz", cached):
        try:
            return _unpack(name, path.read_bytes())
        except (OSError, EOFError, zlib.error) as error:
            failures.append(f"{path}: {error}")
    for mirror in MIRRORS:
        url = f"{mirror}/{name}.gz"
        try:
            return _download(name, url, cached)
        except (OSError, EOFError, zlib.error, http.client.HTTPException) as error:
            failures.append(f"{url}: {error}")
    raise DatasetError(
        f"The file {name!r} of Fashion-MNIST was found neither in Debian's package, nor in the cache, nor at a "
        "mirror:\n  "
        + "\n  ".join(failures)
        + "\nInstall Debian's package with `apt-get install dataset-fashion-mnist`, or put the four .gz files of "
        + f"https://github.com/zalandoresearch/fashion-mnist into {cached.parent}."
    )


def _unpack(name: str, packed: bytes) -> bytes:
    """Returns the uncompressed content of a file of Fashion-MNIST; raises DatasetError if its checksum is wrong."""
    if len(packed) > MAX_BYTES:
        raise DatasetError(
            f"The compressed file {name!r} has more than {MAX_BYTES} bytes, so it is not a file of Fashion-MNIST. Use "
            "another copy of the file."
        )
    with gzip.open(io.BytesIO(packed)) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:  # limited, because a small file that is not the right one could fill the memory
        raise DatasetError(
            f"The uncompressed file {name!r} has more than {MAX_BYTES} bytes, so it is not a file of Fashion-MNIST. "
            "Use another copy of the file."
        )
    if (sha256 := hashlib.sha256(content).hexdigest()) != SHA256[name]:
        raise DatasetError(
            f"The sha256 of {name!r} must be {SHA256[name]}. Got {sha256}. Use another copy of the file."
        )
    return content


def _download(name: str, url: str, target: Path) -> bytes:
    """Downloads a file of Fashion-MNIST, stores it in the cache, and returns its uncompressed content."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
        packed: bytes = response.read(MAX_BYTES + 1)
    content = _unpack(name, packed)
    replace_file(target, packed)
    return content
