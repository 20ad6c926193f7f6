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


def divisor_of_sum(weight: float, examples: int, total: int) -> float:
    """The power of two by which a shard's summed loss is divided before the backward pass, and multiplied after it.

    It is near what the whole batch weighs, as far as a shard of `examples` out of `total` can tell, and not below.
    So float16 holds gradients of the size that the batch's mean has, as under GradScaler, and not of its sum.

    >>> divisor_of_sum(weight=12.0, examples=4, total=16), divisor_of_sum(weight=16.0, examples=4, total=16)
    (64.0, 64.0)
    """
    estimate = abs(weight) * total / examples
    if not estimate or not math.isfinite(estimate):
        estimate = total
    fraction, exponent = math.frexp(estimate)
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
