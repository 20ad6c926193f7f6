import gzip
import hashlib
import struct

import numpy as np
import pytest

from lockstep.datasets import fashion, fashion_mnist
from lockstep.errors import DatasetError


def pack(array):
    """The idx file of an array of bytes, gzipped."""
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes())


ARRAYS = {
    "train-images-idx3-ubyte": np.arange(3 * 4 * 4, dtype=np.uint8).reshape(3, 4, 4),
    "train-labels-idx1-ubyte": np.array([7, 0, 9], np.uint8),
    "t10k-images-idx3-ubyte": np.full((2, 4, 4), 255, np.uint8),
    "t10k-labels-idx1-ubyte": np.array([1, 2], np.uint8),
}
FILES = {f"{name}.gz": pack(array) for name, array in ARRAYS.items()}


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The three places where a tiny data set may lie: Debian's folder, the cache, a mirror. All are empty."""
    debian, home, mirror = (tmp_path / name for name in ("debian", "home", "mirror"))
    cache = home / "lockstep" / "fashion-mnist"
    for folder in (debian, cache, mirror):
        folder.mkdir(parents=True)
    monkeypatch.setattr(fashion, "DEBIAN", debian)
    monkeypatch.setattr(fashion, "find_cache_home", lambda: home)
    monkeypatch.setattr(fashion, "MIRRORS", (mirror.as_uri(),))
    sha256 = {name: hashlib.sha256(gzip.decompress(FILES[f"{name}.gz"])).hexdigest() for name in ARRAYS}
    monkeypatch.setattr(fashion, "SHA256", sha256)
    return debian, cache, mirror


def put(folder, **changed):
    """Writes the four files; `changed` replaces the content of those it names."""
    for name, packed in FILES.items():
        (folder / name).write_bytes(changed.get(name.split("-idx")[0].replace("-", "_"), packed))


def check_arrays():
    (x, y), (xt, yt) = fashion_mnist()
    for got, name in zip((x, y, xt, yt), ARRAYS, strict=True):
        assert np.array_equal(got, ARRAYS[name])
    assert x.dtype == xt.dtype == np.uint8
    assert y.dtype == yt.dtype == np.int64


@pytest.mark.parametrize("index", [0, 1, 2], ids=["debian", "cache", "mirror"])
def test_is_read_from_the_place_that_has_it(places, index):
    put(places[index])
    check_arrays()


def test_a_download_is_cached_without_leftovers(places):
    _, cache, mirror = places
    put(mirror)
    fashion_mnist()
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == FILES


@pytest.mark.parametrize(("size", "what"), [(100, "more than 100 bytes"), (2000, "has more than 2000 bytes")])
def test_a_mirror_cannot_fill_the_memory(places, monkeypatch, size, what):
    *_, mirror = places
    put(mirror, train_images=gzip.compress(bytes(10**6)))
    monkeypatch.setattr(fashion, "MAX_BYTES", size)
    with pytest.raises(DatasetError, match=what):
        fashion_mnist()


def test_the_next_mirror_is_used_if_one_fails(places, tmp_path, monkeypatch):
    *_, mirror = places
    put(mirror)
    monkeypatch.setattr(fashion, "MIRRORS", ((tmp_path / "gone").as_uri(), mirror.as_uri()))
    check_arrays()


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"not gzip",
        FILES["train-images-idx3-ubyte.gz"][:-9],  # the end is missing
        FILES["train-images-idx3-ubyte.gz"][:10] + b"\xff" * 20,  # the header is whole, the rest is noise
        pack(ARRAYS["train-images-idx3-ubyte"] + 1),  # well formed, other pixels
    ],
)
def test_a_broken_copy_in_the_cache_is_replaced(places, bad):
    _, cache, mirror = places
    put(cache, train_images=bad)
    put(mirror)
    check_arrays()
    assert (cache / "train-images-idx3-ubyte.gz").read_bytes() == FILES["train-images-idx3-ubyte.gz"]


def test_a_download_with_another_checksum_is_not_kept(places):
    _, cache, mirror = places
    put(mirror, train_images=pack(ARRAYS["train-images-idx3-ubyte"] + 1))
    with pytest.raises(DatasetError, match=r"The sha256 of '.*' must be [0-9a-f]{64}\. Got [0-9a-f]{64}\."):
        fashion_mnist()
    assert list(cache.iterdir()) == []


def test_an_error_lists_the_places_tried_and_what_to_install(places):
    debian, cache, mirror = places
    with pytest.raises(DatasetError) as caught:
        fashion_mnist()
    rule, *tried, advice = str(caught.value).splitlines()
    assert rule == (
        "The file 'train-images-idx3-ubyte' of Fashion-MNIST was found neither in Debian's package, nor in the "
        "cache, nor at a mirror:"
    )
    for line, place in zip(tried, (debian, cache, mirror.as_uri()), strict=True):
        assert line.startswith(f"  {place}/train-images-idx3-ubyte.gz: ")
        assert "No such file or directory" in line
    assert advice == (
        "Install Debian's package with `apt-get install dataset-fashion-mnist`, or put the four .gz files of "
        f"https://github.com/zalandoresearch/fashion-mnist into {cache}."
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "The file is not an idx file with 1 axes: it begins with '' instead of '00000801'."),
        (
            bytes([0, 0, 8, 3]),
            "The file is not an idx file with 1 axes: it begins with '00000803' instead of '00000801'.",
        ),
        # 32-bit floats
        (
            bytes([0, 0, 13, 1]),
            "The file is not an idx file with 1 axes: it begins with '00000d01' instead of '00000801'.",
        ),
        (bytes([0, 0, 8, 1, 0, 0]), "The idx file is incomplete: it has 6 bytes, and the header alone has 8 bytes."),
        (
            bytes([0, 0, 8, 1, 0, 0, 0, 3, 1, 2]),
            "The idx file has 2 bytes after its header, and its shape (3,) needs 3 bytes.",
        ),
        (
            bytes([0, 0, 8, 1, 0, 0, 0, 1, 1, 2]),
            "The idx file has 2 bytes after its header, and its shape (1,) needs 1 bytes.",
        ),
    ],
)
def test_an_idx_file_is_exactly_what_its_header_says(content, message):
    with pytest.raises(DatasetError) as caught:
        fashion.parse_idx(content, num_axes=1)
    assert str(caught.value) == f"{message} Use another copy of the file."
