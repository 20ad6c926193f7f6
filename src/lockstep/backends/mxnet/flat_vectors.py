"""Nodes: a leaf's vectors, and its arrays as views of them, made once and used in every step."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mxnet import nd
from mxnet.base import _LIB, c_handle_array, check_call, mx_uint

from lockstep.backends.mxnet.arrays import view
from lockstep.core.layout import Layout


class Marks:
    """Marks variables so that their gradients are written into some arrays, which is asked for once a shard."""

    def __init__(self, gradients: Sequence[Any]) -> None:
        self._gradients = c_handle_array(gradients)
        self._write = (mx_uint * len(gradients))(*[1] * len(gradients))

    def __call__(self, variables: Sequence[Any]) -> None:
        check_call(
            _LIB.MXAutogradMarkVariables(len(self._write), c_handle_array(variables), self._write, self._gradients)
        )


class Vectors(dict[str, Any]):
    """A node, on the context where its first leaf is computed; a backward pass writes straight into its views."""

    def __init__(self, layout: Layout, num_trained: int, vectors: Mapping[str, Any] | None = None) -> None:
        super().__init__(vectors or {})
        self.lent = vectors is not None  # whether somebody else holds the memory
        self._layout = layout
        self._num_trained = num_trained
        self.context = self["float64"].ctx if self.lent else None
        self.gradients: list[Any] = []
        if self.lent:
            self._look()

    def on(self, context: Any) -> "Vectors":
        """The node itself, of zeros where it has not been on this context before."""
        if context != self.context and not self.lent:
            self.context = context
            for dtype, length in self._layout.lengths.items():
                self[dtype] = nd.zeros((length,), ctx=context, dtype=dtype)
            self._look()
        return self

    def _look(self) -> None:
        """Makes the views: the gradient of every trained parameter, and the sums."""
        *fields, last = self._layout.fields
        self.gradients = [
            view(self[field.dtype], field.offset, field.offset + field.size, field.shape)
            for field in fields[: self._num_trained]
        ]
        self.sums = view(self[last.dtype], last.offset, last.offset + last.size)
        self.mark = Marks(self.gradients)

    def clear(self) -> None:
        """Zeros for everything but the sums."""
        sums = self._layout.fields[-1]
        for dtype, vector in self.items():
            part = view(vector, 0, sums.offset) if dtype == sums.dtype and sums.offset else vector
            if dtype != sums.dtype or sums.offset:
                nd.zeros_like(part, out=part)


def inside(memory: memoryview, layout: Layout, num_trained: int) -> Vectors:
    """A node in memory that somebody else holds, on the first CPU context."""
    vectors = {
        dtype: nd.from_numpy(np.frombuffer(memory, dtype, length, layout.starts[dtype]), zero_copy=True)
        for dtype, length in layout.lengths.items()
    }
    return Vectors(layout, num_trained, vectors)


def place(node: Mapping[str, Any]) -> Any:
    """The context of a node."""
    return node.context if isinstance(node, Vectors) else next(iter(node.values())).ctx


def add(left: Mapping[str, Any], right: Mapping[str, Any] | None, out: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """MXNet's own addition, on the context of the left side; a copy where there is no right side."""
    if right is None:
        assert out is not None
        for dtype, vector in left.items():
            vector.copyto(out[dtype])
        return out
    result = {}
    away = place(left) != place(right)
    for dtype, vector in left.items():
        other = right[dtype].copyto(vector.ctx) if away else right[dtype]
        if out is None:
            result[dtype] = nd.elemwise_add(vector, other)
        else:
            nd.elemwise_add(vector, other, out=out[dtype])
    return result if out is None else out


def norm(gradients: Sequence[Any]) -> float:
    """The norm over all arrays, each of which gives its own first."""
    squares = [float(norm.asscalar()) ** 2 for norm in [nd.norm(gradient) for gradient in gradients]]
    return float(np.sqrt(sum(squares)))
