"""Inputs: a shard's arrays in fresh memory, and how a model is called with them.

Kernels choose their path by a pointer's alignment, and with it their bits. So a
shard's arrays are always copied into buffers of their own and never are views of
the batch.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lockstep.core.batches import OBJECTIVE_EXAMPLE, describe, transform
from lockstep.errors import BatchError


def put(value: Any, device: torch.device) -> Any:
    """A nest with every array in a fresh, contiguous tensor on the device."""

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            fresh = torch.empty(value.shape, dtype=value.dtype, device=device)
            return fresh.copy_(value.detach())
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
            return torch.tensor(value, device=device)
        if isinstance(value, list):
            return [put(entry, device) for entry in value]
        return value

    return transform(value, leaf)


def host(value: Any) -> Any:
    """A tensor as numpy, sharing its memory where it can; anything else as it is."""
    if isinstance(value, list):
        return [host(entry) for entry in value]
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return value if value.dtype == torch.bfloat16 else value.numpy()  # numpy has no bfloat16


def call(model: torch.nn.Module, inputs: Any) -> Any:
    """The model's outputs: a tuple of inputs is spread, a dict goes in by name."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def parts(batch: Any) -> tuple[Any, Any, Any]:
    """The inputs, targets and example weights (or None) of a batch."""
    if isinstance(batch, tuple) and len(batch) == 2:
        return batch[0], batch[1], None
    if isinstance(batch, tuple) and len(batch) == 3:
        return batch
    raise BatchError(
        "With a loss of (outputs, targets) a batch is (inputs, targets) or (inputs, targets, weights). "
        f"Got {describe(batch)}. Give one of these, or write an objective:\n{OBJECTIVE_EXAMPLE}"
    )
