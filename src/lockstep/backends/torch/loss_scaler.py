"""The scaler: dynamic loss scaling for float16, decided from the summed gradient.

The rule is that of torch's GradScaler: an update whose gradient is not finite is
left out and halves the scale, 2,000 updates in a row double it. Every replica sees
the same sum, so every replica takes the same decision. Scales are powers of two:
scaling and unscaling change no bits.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import NonFiniteError

GROWTH_INTERVAL = 2000
SMALLEST_SCALE = 2.0**-24  # a gradient of 1 is then the smallest number that float16 has
HALF = 1 << 32  # in the flag of a gradient that is there: the backward pass held it in float16
LARGEST_SCALE = 2.0**127  # of float32, in which gradients are unscaled


def power_of_two(weight: float) -> float:
    """The smallest power of two from `weight` on: a shard's summed loss is divided by it before the backward pass.

    `weight` is what the whole batch is divided by, as far as the shard can tell. So float16 holds gradients of the size
    that the batch's mean has, as under GradScaler, and not of its sum. Afterwards they are multiplied by it, exactly.

    >>> power_of_two(48.0), power_of_two(64.0), power_of_two(0.3)
    (64.0, 64.0, 0.5)
    """
    if not math.isfinite(weight):
        return 1.0
    fraction, exponent = math.frexp(weight)
    return math.ldexp(1.0, exponent - (fraction == 0.5))


def cast_parameters(root: Tensor) -> set[int]:
    """The ids of the parameters that the loss depends on through a cast, as autocast makes one to float16."""
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
class Scaler:
    """The scale and how many steps in a row it has held."""

    scale: float = 1.0
    held: int = 0

    def unscale(self, gradients: list[Tensor], halves: list[bool], step: int) -> list[Tensor] | None:
        """The gradients without the scale, or None where one is not finite and the update must be left out.

        `halves` tells which of them the whole batch's backward pass would have held in float16: the sum of the shards'
        may be larger than float16 can be.
        """
        rounded = [gradient.half() if half else gradient for gradient, half in zip(gradients, halves, strict=True)]
        if all(bool(torch.isfinite(gradient).all()) for gradient in rounded):
            unscaled = list(torch._foreach_mul(gradients, 1.0 / self.scale))
            self.held += 1
            if self.held == GROWTH_INTERVAL:
                self.scale, self.held = min(self.scale * 2, LARGEST_SCALE), 0
            return unscaled
        if self.scale <= SMALLEST_SCALE:
            raise NonFiniteError(
                f"The float16 gradient of step {step} is not finite, and its loss scale is at the floor, "
                f"{self.scale:g}: every update left out before has halved it from {2.0**16:g}. The model is as it was "
                "before that step. Look for NaN in the losses of the last steps, use a smaller learning rate, or "
                "precision='bf16', which needs no scale."
            )
        self.scale, self.held = self.scale / 2, 0
        return None
