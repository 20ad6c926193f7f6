"""Partial sums as flat vectors on a context, with views into which a backward pass writes the gradients."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mxnet import nd
from mxnet.base import _LIB, c_handle_array, check_call, mx_uint

from lockstep.backends.mxnet.arrays import view
from lockstep.core.layout import Layout


class GradientTargets:
    """Arrays for gradients, prepared as arguments of MXNet's C function, because every shard calls `attach`."""

    def __init__(self, gradients: Sequence[Any]) -> None:
        self._gradients = c_handle_array(gradients)
        self._write = (mx_uint * len(gradients))(*[1] * len(gradients))

    def attach(self, variables: Sequence[Any]) -> None:
        """Makes the next backward pass write the gradients of the variables into the arrays."""
        check_call(
            _LIB.MXAutogradMarkVariables(len(self._write), c_handle_array(variables), self._write, self._gradients)
        )


class ContextVectors(dict[str, Any]):
    """A partial sum on the context of its first shard; the backward pass writes directly into its vectors."""

    def __init__(self, layout: Layout, num_trained: int, vectors: Mapping[str, Any] | None = None) -> None:
        super().__init__(vectors or {})
        self.has_given_memory = vectors is not None  # whether it was created in an exchange's memory
        self._layout = layout
        self._num_trained = num_trained
        self.context = next(iter(self.values())).ctx if self.has_given_memory else None
        self.gradients: list[Any] = []
        if self.has_given_memory:
            self._make_views()

    def allocate_on(self, context: Any) -> "ContextVectors":
        """Allocates zeros on the context unless the vectors are there already; returns this object."""
        if context != self.context and not self.has_given_memory:
            self.context = context
            for dtype, length in self._layout.lengths.items():
                self[dtype] = nd.zeros((length,), ctx=context, dtype=dtype)
            self._make_views()
        return self

    def _make_views(self) -> None:
        """Creates a view of every trained parameter's gradient."""
        self.gradients = [
            view(self[field.dtype], field.offset, field.offset + field.size, field.shape)
            for field in self._layout.fields[: self._num_trained]
        ]
        self.targets = GradientTargets(self.gradients)

    def clear(self) -> None:
        """Sets all vectors to zero."""
        for vector in self.values():
            nd.zeros_like(vector, out=vector)


def wrap_memory(memory: memoryview, layout: Layout, num_trained: int) -> ContextVectors:
    """Returns vectors in the given memory, on the first CPU context."""
    vectors = {
        dtype: nd.from_numpy(np.frombuffer(memory, dtype, length, layout.starts[dtype]), zero_copy=True)
        for dtype, length in layout.lengths.items()
    }
    return ContextVectors(layout, num_trained, vectors)


def get_context(node: Mapping[str, Any]) -> Any:
    """Returns the context of a partial sum."""
    return node.context if isinstance(node, ContextVectors) else next(iter(node.values())).ctx


def add(left: Mapping[str, Any], right: Mapping[str, Any] | None, out: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Returns left + right on the context of `left`, in `out` if given; copies `left` if `right` is None."""
    if right is None:
        assert out is not None
        for dtype, vector in left.items():
            vector.copyto(out[dtype])
        return out
    result = {}
    is_elsewhere = get_context(left) != get_context(right)
    for dtype, vector in left.items():
        other = right[dtype].copyto(vector.ctx) if is_elsewhere else right[dtype]
        if out is None:
            result[dtype] = nd.elemwise_add(vector, other)
        else:
            nd.elemwise_add(vector, other, out=out[dtype])
    return result if out is None else out


def compute_norm(gradients: Sequence[Any]) -> float:
    """Returns the norm of all arrays together, computed from the norm of each array."""
    squares = [float(norm.asscalar()) ** 2 for norm in [nd.norm(gradient) for gradient in gradients]]
    return float(np.sqrt(sum(squares)))
