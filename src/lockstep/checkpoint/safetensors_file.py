"""Arrays in a safetensors file.

The head of such a file follows from the names, types and shapes of its arrays
alone. So the reader, who has these from the manifest, makes the head that should be
there and compares. It never follows a number that a file claims.

The file is written by hand, not by the safetensors package: the arrays go to disk
from where they lie, the digest is made on the way, and a full disk is an `OSError`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.backends.base import Array, State
from lockstep.errors import StateError

ALIGNMENT = 8  # where the head of a safetensors file ends
MAX_AXES = 32  # numpy's, before version 2


class Kind(NamedTuple):
    """A type of array: as numpy holds it, as the file names it, and `stored` where the two need a word between them."""

    dtype: str
    numpy: str
    file: str
    stored: str | None = None

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return np.dtype(self.numpy).itemsize

    def file_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the file, where a complex128 is two numbers."""
        return (*shape, 2) if self.stored == "F64 pairs" else shape


KINDS = (
    Kind("bool", "|b1", "BOOL"),
    Kind("int8", "|i1", "I8"),
    Kind("int16", "<i2", "I16"),
    Kind("int32", "<i4", "I32"),
    Kind("int64", "<i8", "I64"),
    Kind("uint8", "|u1", "U8"),
    Kind("uint16", "<u2", "U16"),
    Kind("uint32", "<u4", "U32"),
    Kind("uint64", "<u8", "U64"),
    Kind("float16", "<f2", "F16"),
    Kind("bfloat16", "<i2", "BF16"),
    Kind("float32", "<f4", "F32"),
    Kind("float64", "<f8", "F64"),
    Kind("complex64", "<c8", "C64"),
    Kind("complex128", "<c16", "F64", stored="F64 pairs"),
    Kind("python", "|b1", "BOOL", stored="BOOL"),
    Kind("python", "<i8", "I64", stored="I64"),
    Kind("python", "<f8", "F64", stored="F64"),
)
_HELD = {(kind.dtype, np.dtype(kind.numpy)): kind for kind in KINDS}
_RECORDED = {(kind.dtype, kind.stored): kind for kind in KINDS}


@dataclass(frozen=True)
class Form:
    """The kind and shape of one array: all that the head of a file says of it.

    >>> Form.of(Array(np.zeros((2, 3), "float32"), "float32"), "model.weight").record()
    {'dtype': 'float32', 'shape': [2, 3]}
    >>> Form.of(Array(np.asarray(7), "python"), "optimizer.step").record()
    {'dtype': 'python', 'stored': 'I64', 'shape': []}
    """

    kind: Kind
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: Array, at: str) -> "Form":
        """The form of an array; refuses what a checkpoint cannot hold, and says where it was."""
        kind = _HELD.get((array.dtype, array.data.dtype))
        if kind is None or array.data.ndim > (0 if array.dtype == "python" else MAX_AXES):
            held = "" if array.dtype == array.data.dtype.name else f" held as {array.data.dtype.name}{array.data.shape}"
            names = ", ".join(dict.fromkeys(kind.dtype for kind in KINDS if kind.dtype != "python"))
            raise StateError(
                f"A checkpoint holds arrays of {names}, and single numbers. Got {array.dtype}{held} at {at}. "
                "Convert it, for example with .astype or .tolist()."
            )
        return cls(kind, array.data.shape)

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> "Form":
        """The form that a manifest's record tells of; `ValueError` where it tells none."""
        dtype, stored, shape = record.get("dtype"), record.get("stored"), record.get("shape")
        kind = _RECORDED.get((dtype, stored)) if isinstance(dtype, str) and isinstance(stored, str | None) else None
        if kind is None:
            raise ValueError(f"no type of array is {dtype!r:.50}")
        if not isinstance(shape, list) or len(shape) > MAX_AXES or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(f"no shape is {shape!r:.50}")
        if dtype == "python" and shape:
            raise ValueError("a single number has no axes")
        return cls(kind, tuple(shape))

    def record(self) -> dict[str, Any]:
        """What the manifest says."""
        stored = {} if self.kind.stored is None else {"stored": self.kind.stored}
        return {"dtype": self.kind.dtype, **stored, "shape": list(self.shape)}

    @property
    def nbytes(self) -> int:
        """The bytes of the array."""
        return prod(self.shape) * self.kind.itemsize


def order(forms: Mapping[str, Form]) -> list[str]:
    """The names as they follow each other in a file: large elements first, so that each array is aligned."""
    return sorted(forms, key=lambda name: (-forms[name].kind.itemsize, name))


def head(forms: Mapping[str, Form]) -> bytes:
    """The first bytes of the file that holds arrays of these forms.

    >>> head({"weight": Form(KINDS[11], (2,))})[8:]
    b'{"weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}     '
    """
    entries = {}
    stop = 0
    for name in order(forms):
        form = forms[name]
        start, stop = stop, stop + form.nbytes
        shape = list(form.kind.file_shape(form.shape))
        entries[name] = {"dtype": form.kind.file, "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def size(forms: Mapping[str, Form]) -> int:
    """The bytes of the file that holds arrays of these forms."""
    return len(head(forms)) + sum(form.nbytes for form in forms.values())


def write(put: Callable[[Any], None], state: Mapping[str, Array], forms: Mapping[str, Form]) -> None:
    """Puts the bytes of a file, in turn: the head, then the arrays."""
    put(head(forms))
    for name in order(forms):
        put(flat(state[name].data))


def read(file: BufferedReader, forms: Mapping[str, Form]) -> tuple[State, str]:
    """The arrays of a file and the digest of all its bytes; `ValueError` where it does not hold these forms.

    Takes no more memory than the file is long: call it when the file's length is `size(forms)`.
    """
    digest = hashlib.sha256()
    expected = head(forms)
    if (found := file.read(len(expected))) != expected:
        raise ValueError("its head does not list the arrays of the manifest")
    digest.update(found)
    state: State = {}
    for name in order(forms):
        form = forms[name]
        try:
            data: NDArray[Any] = np.empty(form.shape, form.kind.numpy)
        except (ValueError, MemoryError) as error:
            raise ValueError(f"array {name!r:.100} cannot be made: {error}") from error
        view = flat(data)
        if file.readinto(view.data) != view.nbytes:
            raise ValueError("it ends too early")
        digest.update(view.data)
        state[name] = Array(data, form.kind.dtype)
    return state, digest.hexdigest()


def flat(data: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of an array in C order, without a copy where it lies so.

    >>> flat(np.asarray([1, 256], "<i2"))
    array([1, 0, 0, 1], dtype=uint8)
    """
    return np.asarray(data, order="C").reshape(-1).view(np.uint8)
