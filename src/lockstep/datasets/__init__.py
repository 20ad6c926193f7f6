"""Two small real datasets: one inside the package, one found on the disk or downloaded and verified."""

from lockstep.datasets.bundled import digits
from lockstep.datasets.fashion import fashion_mnist

__all__ = ["digits", "fashion_mnist"]
