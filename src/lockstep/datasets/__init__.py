"""Small data sets: digits, which is part of the package; MNIST and Fashion-MNIST, which are downloaded if necessary."""

from lockstep.datasets.bundled import digits
from lockstep.datasets.fashion import fashion_mnist
from lockstep.datasets.mnist_files import mnist

__all__ = ["digits", "fashion_mnist", "mnist"]
