"""The scaler: dynamic loss scaling for float16, decided from the summed gradient.

Every replica sees the same sum, so every replica takes the same decision. Scales
are powers of two: scaling and unscaling change no bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GROWTH_INTERVAL = 2000


@dataclass
class Scaler:
    """The scale and how many steps in a row it has held."""

    scale: float = 1.0
    held: int = 0

    def unscale(self, gradients: list[Tensor]) -> list[Tensor] | None:
        """The gradients without the scale, or None where one overflowed and the update must be left out."""
        unscaled = list(torch._foreach_mul(gradients, 1.0 / self.scale))
        if all(bool(torch.isfinite(gradient).all()) for gradient in unscaled):
            self.held += 1
            if self.held == GROWTH_INTERVAL:
                self.scale, self.held = self.scale * 2, 0
            return unscaled
        self.scale, self.held = max(self.scale / 2, 1.0), 0
        return None
