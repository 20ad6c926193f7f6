"""Checks whether a saved state fits a model and its optimizer, and whether this run would give the same bits.

Every backend's `load` calls `check_state` before it writes anything, so a state that does not fit changes nothing, and
the error is the same in every framework.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lockstep.core.types import Array
from lockstep.errors import ExactError, StateError

MODEL, OPTIMIZER = "model.", "optimizer."
_NUM_SHOWN = 3
_LABELS = {"device": "device type", "bits": "Lockstep arithmetic"}


class ArraySpec(NamedTuple):
    """The shape and the dtype of one array of a state; the length of an axis that is not known yet is None."""

    shape: tuple[int | None, ...]
    dtype: str

    @classmethod
    def from_array(cls, array: "Array") -> "ArraySpec":
        """Returns the shape and the dtype of an array."""
        return cls(array.data.shape, array.dtype)


def check_state(saved: "Mapping[str, Array]", own: Mapping[str, ArraySpec]) -> None:
    """Raises `StateError` unless the saved state has exactly the arrays of `own`, with the same shapes and dtypes.

    The message lists the first differences in the model, or, if the model fits, in the optimizer.

    >>> import numpy as np
    >>> from lockstep.core.types import Array
    >>> saved = {"model.weight": Array(np.zeros((64, 32), "float32"), "float32")}
    >>> check_state(saved, {"model.weight": ArraySpec((64, 32), "float32")})
    >>> check_state(saved, {"model.weight": ArraySpec((64, 48), "float32")})
    Traceback (most recent call last):
    lockstep.errors.StateError: The checkpoint does not fit this model: 'weight' is (64, 32) in the checkpoint and \
(64, 48) in the model. Load a checkpoint of this model.
    """
    for part, advice in (
        ("model", "Load a checkpoint of this model."),
        ("optimizer", "Use the optimizer that the checkpoint was saved with."),
    ):
        found = list(_list_differences(part, saved, own))
        if found:
            hidden = [f"{len(found) - _NUM_SHOWN} more"] if len(found) > _NUM_SHOWN else []
            raise StateError(
                f"The checkpoint does not fit this {part}: {'; '.join([*found[:_NUM_SHOWN], *hidden])}. {advice}"
            )


def check_versions(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises `ExactError` if the run that saved a checkpoint had other versions, so that its steps gave other bits.

    Both arguments map everything that determines the bits (a framework, `device`, `device model`, a library, a number
    of threads) to its version. docs/limits.md lists what is compared and what is not.

    >>> check_versions({"torch": "2.7.0", "device": "cuda"}, {"torch": "2.8.0", "device": "cuda"})
    Traceback (most recent call last):
    lockstep.errors.ExactError: The checkpoint was saved with torch 2.7.0, and this run has torch 2.8.0, so its \
results may differ in some bits. Use the same torch, or exact=False to continue without bit-identical results.
    """
    first = [name for name in ("device", "bits") if name in saved or name in own]  # other differences may follow
    for name in [*first, *sorted(saved.keys() | own.keys(), key=str)]:
        there, here, label = saved.get(name), own.get(name), _LABELS.get(name, name)
        if name not in saved:
            raise ExactError(
                f"The checkpoint does not say with which {label} it was saved, because an older version of Lockstep "
                f"wrote it. This run has {label} {here}, so its results may differ in some bits. Use exact=False to "
                "continue without bit-identical results."
            )
        if there != here:
            mine = f"{label} {here}" if name in own else f"no {label}"
            raise ExactError(
                f"The checkpoint was saved with {label} {there}, and this run has {mine}, so its results may differ in "
                f"some bits. Use the same {label}, or exact=False to continue without bit-identical results."
            )


def _list_differences(part: str, saved: "Mapping[str, Array]", own: Mapping[str, ArraySpec]) -> Iterator[str]:
    """Yields a text for each array of the model or of the optimizer that differs between the saved state and `own`."""
    for name, spec in own.items():
        if _find_part(name) != part:
            continue
        if name not in saved:
            yield f"{_shorten(name)!r} is missing from the checkpoint"
            continue
        there = ArraySpec.from_array(saved[name])
        same_shape, same_dtype = _is_same_shape(there.shape, spec.shape), there.dtype == spec.dtype
        if not (same_shape and same_dtype):
            yield (
                f"{_shorten(name)!r} is {_describe(there, same_shape, same_dtype)} in the checkpoint and "
                f"{_describe(spec, same_shape, same_dtype)} in the {part}"
            )
    for name in saved:
        if _find_part(name) == part and name not in own:
            yield f"{_shorten(name)!r} is not in the {part}"


def _find_part(name: str) -> str:
    """Returns `optimizer` if an array belongs to the optimizer, otherwise `model`."""
    return "optimizer" if name.startswith(OPTIMIZER) else "model"


def _shorten(name: str) -> str:
    """Returns the array's name without the prefix, because the message names the part."""
    return name.removeprefix(MODEL).removeprefix(OPTIMIZER)


def _is_same_shape(there: tuple[int | None, ...], here: tuple[int | None, ...]) -> bool:
    return len(there) == len(here) and all(size in (None, other) for size, other in zip(here, there, strict=True))


def _describe(spec: ArraySpec, same_shape: bool, same_dtype: bool) -> str:
    """Returns a text with the shape, the dtype or both, depending on what differs."""
    return " of ".join(([] if same_shape else [str(spec.shape)]) + ([] if same_dtype else [spec.dtype]))
