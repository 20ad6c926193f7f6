"""Running statistics: every shard of a step starts from the same values, and the shards' new values are averaged.

MXNet's batch norm writes its running mean and variance in the backward pass. After each shard, the new values are
copied to the shard's partial sum, with marks for the elements that have changed, and the block gets its old values
back. All statistics of one type are one vector there, so each of these operations is one operator for all layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mxnet import nd

from lockstep.backends.mxnet.arrays import choose_sum_dtype, flatten, get_dtype, view
from lockstep.backends.mxnet.replicas import Replicas
from lockstep.backends.mxnet.unsupported import iterate_blocks
from lockstep.core.averaged_state import AveragedArray
from lockstep.core.layout import Layout
from lockstep.core.weighing import Share

CHANGED = "changed: "  # with a statistic's name after it, the name of the field with the statistic's marks

Spec = tuple[str, str, tuple[int, ...]]


def list_fields(values: Sequence[Spec]) -> list[Spec]:
    """Returns the statistics' fields in a partial sum: all values, then marks for the elements that have changed."""
    return [*values, *((CHANGED + name, dtype, shape) for name, dtype, shape in values)]


def find_names(block: Any, parameters: Mapping[str, Any]) -> list[str]:
    """Returns the names of the running statistics: parameters that are not trained, but may be written to.

    A frozen weight of a gluon layer is not a running statistic.
    """
    own = [each for each in iterate_blocks(block) if type(each).__module__.startswith("mxnet.gluon.")]
    frozen = {id(each) for layer in own for each in layer._reg_params.values() if each._differentiable}
    return [name for name, each in parameters.items() if each.grad_req == "null" and id(each) not in frozen]


class RunningStats:
    """The running statistics on every context."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._names: list[str] = []
        self._layout: Layout | None = None
        # By index of the context. Created again if the context has other arrays than the list.
        self._contexts: dict[int, tuple[list[Any], ContextStats]] = {}

    def set_layout(self, names: list[str], layout: Layout) -> None:
        """Sets which statistics there are, and their positions in a partial sum."""
        self._names, self._layout, self._contexts = names, layout, {}

    def forget(self) -> None:
        """Drops what is stored for the contexts, because the replicas have moved."""
        self._contexts = {}

    def read_floats(self) -> list[AveragedArray]:
        """Returns copies of the first context's statistics that are floats."""
        found = {name: self._replicas.get_array(name) for name in self._names}
        floats = {name: array for name, array in found.items() if choose_sum_dtype(get_dtype(array)) != "int64"}
        return [AveragedArray(name, name, array.asnumpy()) for name, array in floats.items()]

    @contextmanager
    def isolate(self, spread: Mapping[str, Sequence[Any]]) -> Iterator[list["ContextStats"]]:
        """Lets shards write to the statistics in this context; afterwards restores them on the first MXNet context."""
        stats = [self._prepare(index, spread) for index in range(len(self._replicas.contexts))]
        for each in stats:
            each.save()
        try:
            yield stats
        finally:
            stats[0].restore()

    def _prepare(self, index: int, spread: Mapping[str, Sequence[Any]]) -> "ContextStats":
        assert self._layout is not None
        own = {name: spread[name][index] for name in self._names}
        last, stats = self._contexts.get(index, ([], None))
        if stats is None or any(array is not before for array, before in zip(own.values(), last, strict=True)):
            stats = ContextStats(own, self._layout)
            self._contexts[index] = list(own.values()), stats
        return stats

    def apply(self, total: Mapping[str, Any]) -> None:
        """Writes the averages of all values that a shard has changed to the first context."""
        self._contexts[0][1].apply(total)


class ContextStats:
    """The statistics of one context, which are saved at the beginning of a step and collected after each shard."""

    def __init__(self, arrays: Mapping[str, Any], layout: Layout) -> None:
        fields = {field.name: field for field in layout.fields}
        self._groups: dict[str, _DtypeStats] = {}
        for dtype in {fields[name].dtype for name in arrays}:
            own = [fields[name] for name in arrays if fields[name].dtype == dtype]
            start, marks = own[0].offset, fields[CHANGED + own[0].name].offset
            ranges = [(field.offset - start, field.size) for field in own]
            self._groups[dtype] = _DtypeStats([arrays[field.name] for field in own], ranges, (start, marks), dtype)

    def save(self) -> None:
        """Copies the statistics as they are before the step."""
        for group in self._groups.values():
            group.gather(group.saved)

    def collect(self, node: Mapping[str, Any], share: Share, first: bool) -> None:
        """Copies the shard's new statistics to `node`, floats times the shard's fraction, and restores the block."""
        for dtype, group in self._groups.items():
            values, marks = group.get_views(node[dtype])
            group.gather(values)
            nd._internal._not_equal(values, group.saved, out=marks)
            if dtype == "int64":
                if not first:  # integers come from the first shard
                    nd.zeros_like(values, out=values)
            elif not share.alone:
                nd._internal._mul_scalar(values, scalar=share.fraction, out=values)
        self.restore()

    def restore(self) -> None:
        """Writes the saved statistics to the block."""
        for group in self._groups.values():
            group.scatter(group.saved)

    def apply(self, total: Mapping[str, Any]) -> None:
        """Writes the averages of all values that a shard has changed to the block."""
        for dtype, group in self._groups.items():
            values, marks = group.get_views(total[dtype])
            group.scatter(nd.where(marks, values, group.saved))


class _DtypeStats:
    """The statistics of one type as one vector, with the same gaps between them as in a partial sum."""

    def __init__(
        self, arrays: Sequence[Any], ranges: Sequence[tuple[int, int]], starts: tuple[int, int], dtype: str
    ) -> None:
        self._start, self._marks = starts
        self._length = self._marks - self._start
        self._dtype = dtype
        self._context = arrays[0].ctx
        self._flat = [flatten(array) for array in arrays]
        self._has_one_dtype = all(get_dtype(array) == dtype for array in arrays)
        self._boundaries: list[int] = []
        self._gaps: dict[int, Any] = {}  # by the array before the gap
        for index, (start, size) in enumerate(ranges):
            end = ranges[index + 1][0] if index + 1 < len(ranges) else self._length
            self._boundaries.append(start)
            if start + size < end:
                self._boundaries.append(start + size)
                self._gaps[index] = nd.zeros((end - start - size,), ctx=self._context, dtype=dtype)
        self.saved = nd.zeros((self._length,), ctx=self._context, dtype=dtype)

    def get_views(self, vector: Any) -> tuple[Any, Any]:
        """Returns views of the values and of the marks in a partial sum's vector."""
        values = view(vector, self._start, self._marks)
        return values, view(vector, self._marks, self._marks + self._length)

    def gather(self, out: Any) -> None:
        """Copies the block's statistics to `out`."""
        own = self._flat if self._has_one_dtype else [array.astype(self._dtype) for array in self._flat]
        nd.concat(*self._insert_gaps(own), dim=0, out=out)

    def scatter(self, vector: Any) -> None:
        """Copies a vector of all statistics to the block's arrays."""
        own = self._flat
        if not self._has_one_dtype:
            own = [nd.empty(array.shape, self._context, self._dtype) for array in self._flat]
        outputs = self._insert_gaps(own)
        if len(outputs) == 1:
            vector.copyto(outputs[0])
        else:
            nd._internal._split_v2(vector, indices=tuple(self._boundaries), axis=0, squeeze_axis=False, out=outputs)
        if not self._has_one_dtype:
            for array, part in zip(self._flat, own, strict=True):
                nd.cast(part, dtype=array.dtype, out=array)

    def _insert_gaps(self, pieces: Sequence[Any]) -> list[Any]:
        result = []
        for index, piece in enumerate(pieces):
            result.append(piece)
            if index in self._gaps:
                result.append(self._gaps[index])
        return result
