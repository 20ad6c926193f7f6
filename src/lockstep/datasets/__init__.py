"""Two small real data sets: one inside the package, one found on disk or downloaded by checksum."""

from lockstep.datasets.bundled import digits
from lockstep.datasets.fashion import fashion_mnist

__all__ = ["digits", "fashion_mnist"]
