"""Write and read arrays in a safetensors file.

The header of such a file follows from the names, types and shapes of its arrays alone. So the reader, who has these
from the manifest, builds the header that should be there and compares: it never follows a number in the file.

`docs/design/dependencies.md` says why this is not the safetensors package, with which the tests read these files.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lockstep.backends.base import Array, State
from lockstep.errors import StateError

ALIGNMENT = 8  # of the length of a header
MAX_AXES = 32  # of numpy before version 2


class Kind(NamedTuple):
    """A type of array: its numpy type and its name in the file, and `stored` if these two do not determine it."""

    dtype: str
    numpy: Any
    file: str
    stored: str | None = None

    @property
    def itemsize(self) -> int:
        """The number of bytes of one element."""
        itemsize: int = np.dtype(self.numpy).itemsize
        return itemsize

    def file_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the file, which has two floats for a complex128."""
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
    Kind("bfloat16", ml_dtypes.bfloat16, "BF16"),
    Kind("float32", "<f4", "F32"),
    Kind("float64", "<f8", "F64"),
    Kind("complex64", "<c8", "C64"),
    Kind("complex128", "<c16", "F64", stored="F64 pairs"),
    Kind("python", "|b1", "BOOL", stored="BOOL"),
    Kind("python", "<i8", "I64", stored="I64"),
    Kind("python", "<f8", "F64", stored="F64"),
)
_BY_TYPE = {(kind.dtype, np.dtype(kind.numpy)): kind for kind in KINDS}
_BY_RECORD = {(kind.dtype, kind.stored): kind for kind in KINDS}


@dataclass(frozen=True)
class Form:
    """The kind and shape of one array: all that the header of a file says about it.

    >>> Form.from_array(Array(np.zeros((2, 3), "float32"), "float32"), "model.weight").to_record()
    {'dtype': 'float32', 'shape': [2, 3]}
    >>> Form.from_array(Array(np.asarray(7), "python"), "optimizer.step").to_record()
    {'dtype': 'python', 'stored': 'I64', 'shape': []}
    """

    kind: Kind
    shape: tuple[int, ...]

    @classmethod
    def from_array(cls, array: Array, at: str) -> "Form":
        """Return the form of an array; raise if a checkpoint cannot hold it. `at` is its place, for the error."""
        kind = _BY_TYPE.get((array.dtype, array.data.dtype))
        if kind is None or array.data.ndim > (0 if array.dtype == "python" else MAX_AXES):
            stored = "" if array.dtype == array.data.dtype.name else f" in {array.data.dtype.name}{array.data.shape}"
            names = ", ".join(dict.fromkeys(kind.dtype for kind in KINDS if kind.dtype != "python"))
            raise StateError(
                f"A checkpoint cannot hold {array.dtype}{stored} at {at}, only arrays of {names}, and single numbers. "
                "Convert it, for example with .astype or .tolist()."
            )
        return cls(kind, array.data.shape)

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> "Form":
        """Return the form in a manifest's record; raise `ValueError` if it is not valid."""
        dtype, stored, shape = record.get("dtype"), record.get("stored"), record.get("shape")
        kind = _BY_RECORD.get((dtype, stored)) if isinstance(dtype, str) and isinstance(stored, str | None) else None
        if kind is None:
            raise ValueError(f"there is no type of array {dtype!r:.50}")
        if not isinstance(shape, list) or len(shape) > MAX_AXES or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(f"{shape!r:.50} is not a shape")
        if dtype == "python" and shape:
            raise ValueError("a single number has no axes")
        return cls(kind, tuple(shape))

    def to_record(self) -> dict[str, Any]:
        """Return the record of the manifest."""
        stored = {} if self.kind.stored is None else {"stored": self.kind.stored}
        return {"dtype": self.kind.dtype, **stored, "shape": list(self.shape)}

    @property
    def nbytes(self) -> int:
        """The number of bytes of the array."""
        return prod(self.shape) * self.kind.itemsize


def sort_names(forms: Mapping[str, Form]) -> list[str]:
    """Return the names in the order of a file: large elements first, so that each array is aligned."""
    return sorted(forms, key=lambda name: (-forms[name].kind.itemsize, name))


def build_header(forms: Mapping[str, Form]) -> bytes:
    """Return the first bytes of a file of arrays of these forms.

    >>> build_header({"weight": Form(KINDS[11], (2,))})[8:]
    b'{"weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}     '
    """
    entries = {}
    stop = 0
    for name in sort_names(forms):
        form = forms[name]
        start, stop = stop, stop + form.nbytes
        shape = list(form.kind.file_shape(form.shape))
        entries[name] = {"dtype": form.kind.file, "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def compute_size(forms: Mapping[str, Form]) -> int:
    """Return the number of bytes of a file of arrays of these forms."""
    return len(build_header(forms)) + sum(form.nbytes for form in forms.values())


def write(put: Callable[[Any], None], state: Mapping[str, Array], forms: Mapping[str, Form]) -> None:
    """Put the bytes of a file one buffer after the other: the header, then the arrays, without copying them."""
    put(build_header(forms))
    for name in sort_names(forms):
        put(view_bytes(state[name].data))


def read(file: BufferedReader, forms: Mapping[str, Form]) -> tuple[State, str]:
    """Read the arrays of a file and the digest of all its bytes; raise `ValueError` if it does not hold these forms.

    The file must be `compute_size(forms)` long; then no more memory is taken than that.
    """
    digest = hashlib.sha256()
    expected = build_header(forms)
    if (header := file.read(len(expected))) != expected:
        raise ValueError("its header does not list the arrays of the manifest")
    digest.update(header)
    state: State = {}
    for name in sort_names(forms):
        form = forms[name]
        try:
            data: NDArray[Any] = np.empty(form.shape, form.kind.numpy)
        except (ValueError, MemoryError) as error:
            raise ValueError(f"array {name!r:.100} cannot be made: {error}") from error
        view = view_bytes(data)
        if file.readinto(view.data) != view.nbytes:
            raise ValueError("it ends too early")
        digest.update(view.data)
        state[name] = Array(data, form.kind.dtype)
    return state, digest.hexdigest()


def view_bytes(data: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of an array in C order, without a copy if it is in that order.

    >>> view_bytes(np.asarray([1, 256], "<i2"))
    array([1, 0, 0, 1], dtype=uint8)
    """
    return np.asarray(data, order="C").reshape(-1).view(np.uint8)
