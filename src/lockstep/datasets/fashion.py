"""Fashion-MNIST: from Debian's package, from the cache, or from a mirror, whichever has it first.

What is checked is the sha256 of the unpacked content: Debian packs the same bytes anew, so the packed files differ.
A file with another checksum is as good as no file.
"""

import gzip
import hashlib
import http.client
import io
import tempfile
import urllib.request
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.datasets import idx
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
MAX_BYTES = 2**26  # the largest unpacks to 47 MB

Images = tuple[NDArray[np.uint8], NDArray[np.int64]]


def fashion_mnist() -> tuple[Images, Images]:
    """Gives `(x, y), (xt, yt)`: 60,000 and 10,000 grey images of 28×28 pixels, uint8, and their classes, int64.

    Origin: H. Xiao, K. Rasul and R. Vollgraf, Zalando Research, 2017, https://github.com/zalandoresearch/fashion-mnist,
    licence MIT.

    >>> (x, y), (xt, yt) = fashion_mnist()  # doctest: +SKIP
    >>> x.shape, y.shape, xt.shape, yt.shape  # doctest: +SKIP
    ((60000, 28, 28), (60000,), (10000, 28, 28), (10000,))
    """
    return _part("train"), _part("t10k")


def _part(name: str) -> Images:
    images = idx.parse(_find(f"{name}-images-idx3-ubyte"), num_axes=3)
    labels = idx.parse(_find(f"{name}-labels-idx1-ubyte"), num_axes=1)
    return images, labels.astype(np.int64)


def _find(name: str) -> bytes:
    """Gives the content of one file from the first place that has it."""
    cached = find_cache_home() / "lockstep" / "fashion-mnist" / f"{name}.gz"
    tried = []
    for path in (DEBIAN / f"{name}.gz", cached):
        try:
            return _unpack(name, path.read_bytes())
        except (OSError, EOFError, zlib.error) as error:
            tried.append(f"{path}: {error}")
    for mirror in MIRRORS:
        url = f"{mirror}/{name}.gz"
        try:
            return _download(name, url, cached)
        except (OSError, EOFError, zlib.error, http.client.HTTPException) as error:
            tried.append(f"{url}: {error}")
    raise DatasetError(
        f"Fashion-MNIST is read from Debian's package, the cache or a mirror. None gave {name!r}:\n  "
        + "\n  ".join(tried)
        + "\nInstall it with `apt-get install dataset-fashion-mnist`, or put the four .gz files of "
        + f"https://github.com/zalandoresearch/fashion-mnist into {cached.parent}."
    )


def _unpack(name: str, packed: bytes) -> bytes:
    """Gives the unpacked content, whose checksum is the published one."""
    if len(packed) > MAX_BYTES:
        raise DatasetError(f"A file has at most {MAX_BYTES} bytes. Got more.")
    with gzip.open(io.BytesIO(packed)) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:  # before its checksum is known, it must not fill the memory
        raise DatasetError(f"A file unpacks to at most {MAX_BYTES} bytes. Got more.")
    if (sha256 := hashlib.sha256(content).hexdigest()) != SHA256[name]:
        raise DatasetError(f"The content's sha256 must be {SHA256[name]}. Got {sha256}.")
    return content


def _download(name: str, url: str, target: Path) -> bytes:
    """Gives the content at `url` and keeps it, packed, as `target`, which is either whole or not there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
        packed: bytes = response.read(MAX_BYTES + 1)
    content = _unpack(name, packed)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        part = Path(folder, target.name)
        part.write_bytes(packed)
        part.replace(target)
    return content
