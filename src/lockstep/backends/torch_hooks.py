"""torch's `core.framework_hooks`: its global random number generator, tensors and threads.

Beside the torch backend and not inside it, because a process that uses torch in its data pipeline alone, for a JAX
model say, must not import the backend.
"""

from typing import Any

import numpy as np
import torch

GENERATOR_TYPES: tuple[type, ...] = (torch.Generator,)
ARRAY_TYPES: tuple[type, ...] = (torch.Tensor,)
ARRAY_MARK = "lockstep:tensor"


def get_default_generator() -> torch.Generator:
    """Returns the CPU generator of the whole process."""
    return torch.default_generator


def get_rng_state() -> torch.Tensor:
    """Returns a copy of that generator's state."""
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Restores that generator's state."""
    torch.default_generator.set_state(state)


def is_equal_rng_state(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two states are equal."""
    return bytes(one.numpy()) == bytes(other.numpy())


def seed_rng(seed: int) -> None:
    """Seeds that generator."""
    torch.default_generator.manual_seed(seed)


def get_num_threads() -> int:
    """Returns the number of threads of an operation."""
    return torch.get_num_threads()


def set_num_threads(count: int) -> None:
    """Sets the number of threads of an operation."""
    torch.set_num_threads(count)


def to_numpy(array: torch.Tensor) -> Any:
    """Returns a copy as a numpy array; raises TypeError for a type that numpy lacks, such as bfloat16."""
    return array.detach().cpu().numpy().copy()


def to_bytes(array: torch.Tensor) -> Any:
    """Returns the tensor's bytes as a numpy array of uint8."""
    return array.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def from_numpy(array: Any) -> torch.Tensor:
    """Returns a tensor with a copy of this array."""
    return torch.from_numpy(np.array(array))
