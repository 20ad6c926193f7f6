"""Dynamic loss scaling for float16, decided from the summed gradient.

The rule is that of torch's GradScaler: an update whose gradient is not finite is left out and halves the scale;
2,000 updates in a row double it. Every replica has the same sum and so makes the same decision. Scales are powers
of two, so scaling and unscaling change no bits.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.core.types import Array, State
from lockstep.errors import NonFiniteError

GROWTH_INTERVAL = 2000
SMALLEST_SCALE = 2.0**-24  # a gradient of 1 then becomes the smallest number that float16 has
HALF = 1 << 32  # added to the flag of a gradient that the backward pass computed in float16
SCALE, NUM_UPDATES = "scaler.scale", "scaler.held"  # names in the state
LARGEST_SCALE = 2.0**127  # of float32, in which gradients are unscaled


def find_power_of_two(weight: float) -> float:
    """Returns the smallest power of two that is at least `weight`; a shard's summed loss is divided by it.

    `weight` is the divisor of the whole batch's loss, as far as the shard can know it. Dividing keeps the float16
    gradients at the scale of the batch's mean, as under GradScaler, instead of its sum. The gradients are later
    multiplied by the same power of two, which is exact.

    >>> find_power_of_two(48.0), find_power_of_two(64.0), find_power_of_two(0.3)
    (64.0, 64.0, 0.5)
    """
    if not math.isfinite(weight):
        return 1.0
    fraction, exponent = math.frexp(weight)
    return math.ldexp(1.0, exponent - (fraction == 0.5))


def find_cast_parameters(root: Tensor) -> set[int]:
    """Returns the ids of the parameters on which the loss depends through a cast, such as autocast's to float16."""
    found: set[int] = set()
    seen: set[Any] = set()
    nodes = [root.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for below, _ in node.next_functions:
            if node.name() == "ToCopyBackward0" and (parameter := getattr(below, "variable", None)) is not None:
                found.add(id(parameter))
            nodes.append(below)
    return found


@dataclass
class LossScaler:
    """The scale, and the number of updates since it last changed."""

    scale: float = 1.0
    num_updates: int = 0

    @classmethod
    def from_state(cls, state: Mapping[str, Array]) -> "LossScaler":
        """Returns a scaler with the scale and the number of updates in a saved state."""
        return cls(state[SCALE].data.item(), state[NUM_UPDATES].data.item())

    def to_state(self) -> State:
        """Returns the scale and the number of updates as arrays, for a checkpoint."""
        updates = Array(np.asarray(self.num_updates), "int64")
        return {SCALE: Array(np.asarray(self.scale), "float64"), NUM_UPDATES: updates}

    def unscale(self, gradients: list[Tensor], halves: list[bool], step: int) -> list[Tensor] | None:
        """Returns the gradients divided by the scale; None if one is not finite, so that the update must be skipped.

        `halves` says which gradients a backward pass over the whole batch would have in float16. These must be finite
        in float16, too, although their sum over the shards is float32.
        """
        rounded = [gradient.half() if half else gradient for gradient, half in zip(gradients, halves, strict=True)]
        if all(bool(torch.isfinite(gradient).all()) for gradient in rounded):
            unscaled = list(torch._foreach_mul(gradients, 1.0 / self.scale))
            self.num_updates += 1
            if self.num_updates == GROWTH_INTERVAL:
                self.scale, self.num_updates = min(self.scale * 2, LARGEST_SCALE), 0
            return unscaled
        if self.scale <= SMALLEST_SCALE:
            raise NonFiniteError(
                f"The float16 gradient of step {step} is not finite although the loss scale is already at its minimum, "
                f"{self.scale:g}: each skipped update halves it. The model is as it was before that step. Look for NaN "
                "in the losses of the last steps, use a smaller learning rate, or use precision='bf16', which needs "
                "no loss scale."
            )
        self.scale, self.num_updates = self.scale / 2, 0
        return None
