"""Writes and reads arrays in a safetensors file.

The names, types and shapes of the arrays determine the header of such a file. The reader knows them from the manifest,
so it builds the expected header and compares it with the header in the file; it never uses an offset from the file.

`docs/design/dependencies.md` says why the package `safetensors` is only used by the tests, which read these files.
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

from lockstep.core.types import Array, State
from lockstep.errors import StateError

ALIGNMENT = 8  # the length of a header is a multiple of this
MAX_AXES = 32  # the limit of numpy before version 2


class Kind(NamedTuple):
    """An array type that can be saved, the numpy type of the stored array, and the type's name in a safetensors file.

    `stored` says how the array is stored, if this does not follow from the array type.
    """

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
        """Returns the shape of an array in the file, where a complex128 is a pair of floats."""
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
    """The kind and the shape of one array, which determine its entry in the header of a file.

    >>> Form.from_array(Array(np.zeros((2, 3), "float32"), "float32"), "model.weight").to_record()
    {'dtype': 'float32', 'shape': [2, 3]}
    >>> Form.from_array(Array(np.asarray(7), "python"), "optimizer.step").to_record()
    {'dtype': 'python', 'stored': 'I64', 'shape': []}
    """

    kind: Kind
    shape: tuple[int, ...]

    @classmethod
    def from_array(cls, array: Array, at: str) -> "Form":
        """Returns the form of an array; raises StateError, which calls the array `at`, if it cannot be stored."""
        kind = _BY_TYPE.get((array.dtype, array.data.dtype))
        if kind is None or array.data.ndim > (0 if array.dtype == "python" else MAX_AXES):
            stored = "" if array.dtype == array.data.dtype.name else f" in {array.data.dtype.name}{array.data.shape}"
            names = ", ".join(dict.fromkeys(kind.dtype for kind in KINDS if kind.dtype != "python"))
            raise StateError(
                f"A checkpoint cannot store {array.dtype}{stored} at {at}, only arrays of {names}, and single numbers. "
                f"Convert {at}, for example with .astype or .tolist()."
            )
        return cls(kind, array.data.shape)

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> "Form":
        """Returns the form that a manifest's record describes; raises `ValueError` if the record is not valid."""
        dtype, stored, shape = record.get("dtype"), record.get("stored"), record.get("shape")
        kind = _BY_RECORD.get((dtype, stored)) if isinstance(dtype, str) and isinstance(stored, str | None) else None
        if kind is None:
            raise ValueError(f"{dtype!r:.50}, stored as {stored!r:.50}, is not the dtype of an array")
        if not isinstance(shape, list) or len(shape) > MAX_AXES or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(f"{shape!r:.50} is not a shape")
        if dtype == "python" and shape:
            raise ValueError(f"a single number must have the shape [], got {shape!r:.50}")
        return cls(kind, tuple(shape))

    def to_record(self) -> dict[str, Any]:
        """Returns the record of this form for the manifest."""
        stored = {} if self.kind.stored is None else {"stored": self.kind.stored}
        return {"dtype": self.kind.dtype, **stored, "shape": list(self.shape)}

    @property
    def nbytes(self) -> int:
        """The number of bytes of the array."""
        return prod(self.shape) * self.kind.itemsize


def sort_names(forms: Mapping[str, Form]) -> list[str]:
    """Returns the arrays' names in the order of the file: larger elements first, so that every array is aligned."""
    return sorted(forms, key=lambda name: (-forms[name].kind.itemsize, name))


def build_header(forms: Mapping[str, Form]) -> bytes:
    """Returns the header of a file with arrays of these forms: its length and a JSON text.

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
    """Returns the size in bytes of a file with arrays of these forms."""
    return len(build_header(forms)) + sum(form.nbytes for form in forms.values())


def write(put: Callable[[Any], None], state: Mapping[str, Array], forms: Mapping[str, Form]) -> None:
    """Passes the content of a file to `put`: first the header, then each array, without copying."""
    put(build_header(forms))
    for name in sort_names(forms):
        put(view_bytes(state[name].data))


def read(file: BufferedReader, forms: Mapping[str, Form]) -> tuple[State, str]:
    """Returns the arrays of a file and the sha256 of all its bytes; raises `ValueError` if its header does not fit.

    The caller has checked that the file has `compute_size(forms)` bytes, which limits the memory that this takes.
    """
    digest = hashlib.sha256()
    expected = build_header(forms)
    if (header := file.read(len(expected))) != expected:
        raise ValueError("the header of the file does not list the arrays in the manifest")
    digest.update(header)
    state: State = {}
    for name in sort_names(forms):
        form = forms[name]
        try:
            data: NDArray[Any] = np.empty(form.shape, form.kind.numpy)
        except (ValueError, MemoryError) as error:
            raise ValueError(f"the array {name!r:.100} cannot be created: {error}") from error
        view = view_bytes(data)
        if file.readinto(view.data) != view.nbytes:
            raise ValueError(f"the file ends within the array {name!r:.100}")
        digest.update(view.data)
        state[name] = Array(data, form.kind.dtype)
    return state, digest.hexdigest()


def view_bytes(data: NDArray[Any]) -> NDArray[np.uint8]:
    """Returns the bytes of an array in C order, without a copy if the array is stored in C order.

    >>> view_bytes(np.asarray([1, 256], "<i2"))
    array([1, 0, 0, 1], dtype=uint8)
    """
    return np.asarray(data, order="C").reshape(-1).view(np.uint8)
