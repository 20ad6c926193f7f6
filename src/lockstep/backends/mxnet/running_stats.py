"""Statistics: running means and variances, the same for every shard and averaged by the tree.

A shard's backward pass writes to the block's statistics (MXNet's batch norm does it
there, not in the forward pass). What it left goes into the leaf, with a mark where
it differs, and the block gets back what it had. All statistics of one type lie in
one vector, so that each of this is one operator and not one for every layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mxnet import nd

from lockstep.backends.mxnet.arrays import accumulated, dtype_of, flat, view
from lockstep.backends.mxnet.replicas import Replicas
from lockstep.backends.mxnet.unsupported import blocks
from lockstep.core.averaged_state import AveragedArray
from lockstep.core.layout import Layout
from lockstep.core.weighing import Share

CHANGED = "changed: "  # before the name of a statistic, the field of its marks

Spec = tuple[str, str, tuple[int, ...]]


def fields(values: Sequence[Spec]) -> list[Spec]:
    """The fields of a leaf: first the values, then for each the marks where it changed."""
    return [*values, *((CHANGED + name, dtype, shape) for name, dtype, shape in values)]


def of(block: Any, parameters: Mapping[str, Any]) -> list[str]:
    """The names of the statistics: what is not trained and may still be written to.

    A frozen weight of one of gluon's own layers is not among them.
    """
    own = [each for each in blocks(block) if type(each).__module__.startswith("mxnet.gluon.")]
    frozen = {id(each) for layer in own for each in layer._reg_params.values() if each._differentiable}
    return [name for name, each in parameters.items() if each.grad_req == "null" and id(each) not in frozen]


class Statistics:
    """The statistics on every context."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._names: list[str] = []
        self._layout: Layout | None = None
        self._held: dict[int, tuple[list[Any], Held]] = {}  # by the place of the context, with the arrays it is of

    def lie(self, names: list[str], layout: Layout) -> None:
        """Takes over where the statistics lie in a leaf."""
        self._names, self._layout, self._held = names, layout, {}

    def forget(self) -> None:
        """Forgets the contexts."""
        self._held = {}

    def read_floats(self) -> list[AveragedArray]:
        """Copy the float statistics of the first context."""
        found = {name: self._replicas.array(name) for name in self._names}
        floats = {name: array for name, array in found.items() if accumulated(dtype_of(array)) != "int64"}
        return [AveragedArray(name, name, array.asnumpy()) for name, array in floats.items()]

    @contextmanager
    def kept(self, spread: Mapping[str, Sequence[Any]]) -> Iterator[list["Held"]]:
        """Inside, the shards may write to them; afterwards the first context has back what it had."""
        held = [self._hold(place, spread) for place in range(len(self._replicas.contexts))]
        for each in held:
            each.keep()
        try:
            yield held
        finally:
            held[0].restore()

    def _hold(self, place: int, spread: Mapping[str, Sequence[Any]]) -> "Held":
        assert self._layout is not None
        own = {name: spread[name][place] for name in self._names}
        known, held = self._held.get(place, ([], None))
        if held is None or any(array is not before for array, before in zip(own.values(), known, strict=True)):
            held = Held(own, self._layout)
            self._held[place] = list(own.values()), held
        return held

    def apply(self, total: Mapping[str, Any]) -> None:
        """Writes the averages to the first context, where some shard changed a value."""
        self._held[0][1].apply(total)


class Held:
    """The statistics of one context during one step: kept at its beginning, collected after each shard."""

    def __init__(self, arrays: Mapping[str, Any], layout: Layout) -> None:
        places = {field.name: field for field in layout.fields}
        self._groups: dict[str, _Group] = {}
        for dtype in {places[name].dtype for name in arrays}:
            own = [places[name] for name in arrays if places[name].dtype == dtype]
            start, marks = own[0].offset, places[CHANGED + own[0].name].offset
            ranges = [(field.offset - start, field.size) for field in own]
            self._groups[dtype] = _Group([arrays[field.name] for field in own], ranges, (start, marks), dtype)

    def keep(self) -> None:
        """Remembers the statistics as they are before the step."""
        for group in self._groups.values():
            group.gather(group.kept)

    def collect(self, node: Mapping[str, Any], share: Share, first: bool) -> None:
        """Writes what the shard left into the leaf, floats times its share, and gives the block its own back."""
        for dtype, group in self._groups.items():
            values, marks = group.parts(node[dtype])
            group.gather(values)
            nd._internal._not_equal(values, group.kept, out=marks)
            if dtype == "int64":
                if not first:  # integers come from the first shard
                    nd.zeros_like(values, out=values)
            elif not share.alone:
                nd._internal._mul_scalar(values, scalar=share.fraction, out=values)
        self.restore()

    def restore(self) -> None:
        """Gives the block back what it had."""
        for group in self._groups.values():
            group.scatter(group.kept)

    def apply(self, total: Mapping[str, Any]) -> None:
        """Writes the averages where some shard changed a value."""
        for dtype, group in self._groups.items():
            values, marks = group.parts(total[dtype])
            group.scatter(nd.where(marks, values, group.kept))


class _Group:
    """The statistics of one type, end to end as the leaf has them, with the gaps between."""

    def __init__(
        self, arrays: Sequence[Any], ranges: Sequence[tuple[int, int]], starts: tuple[int, int], dtype: str
    ) -> None:
        self._start, self._marks = starts
        self._length = self._marks - self._start
        self._dtype = dtype
        self._context = arrays[0].ctx
        self._flat = [flat(array) for array in arrays]
        self._alike = all(dtype_of(array) == dtype for array in arrays)
        self._cuts: list[int] = []
        self._gaps: dict[int, Any] = {}  # by the array before the gap
        for index, (start, size) in enumerate(ranges):
            end = ranges[index + 1][0] if index + 1 < len(ranges) else self._length
            self._cuts.append(start)
            if start + size < end:
                self._cuts.append(start + size)
                self._gaps[index] = nd.zeros((end - start - size,), ctx=self._context, dtype=dtype)
        self.kept = nd.zeros((self._length,), ctx=self._context, dtype=dtype)

    def parts(self, vector: Any) -> tuple[Any, Any]:
        """The values and the marks in a node's vector."""
        values = view(vector, self._start, self._marks)
        return values, view(vector, self._marks, self._marks + self._length)

    def gather(self, out: Any) -> None:
        """Writes the block's statistics to `out`."""
        own = self._flat if self._alike else [array.astype(self._dtype) for array in self._flat]
        nd.concat(*self._with_gaps(own), dim=0, out=out)

    def scatter(self, vector: Any) -> None:
        """Writes such a vector to the block's statistics."""
        own = self._flat
        if not self._alike:
            own = [nd.empty(array.shape, self._context, self._dtype) for array in self._flat]
        outputs = self._with_gaps(own)
        if len(outputs) == 1:
            vector.copyto(outputs[0])
        else:
            nd._internal._split_v2(vector, indices=tuple(self._cuts), axis=0, squeeze_axis=False, out=outputs)
        if not self._alike:
            for array, part in zip(self._flat, own, strict=True):
                nd.cast(part, dtype=array.dtype, out=array)

    def _with_gaps(self, pieces: Sequence[Any]) -> list[Any]:
        result = []
        for index, piece in enumerate(pieces):
            result.append(piece)
            if index in self._gaps:
                result.append(self._gaps[index])
        return result
