"""torch's `core.framework_hooks`: its global random number generator, tensors and threads.

This module is not part of the torch backend, because a process that uses torch only in its data pipeline, for
example for a JAX model, must not import the backend.
"""

from typing import Any

import numpy as np
import torch

GENERATOR_TYPES: tuple[type, ...] = (torch.Generator,)
ARRAY_TYPES: tuple[type, ...] = (torch.Tensor,)
ARRAY_MARK = "lockstep:tensor"


def get_default_generator() -> torch.Generator:
    """Returns torch's default CPU generator."""
    return torch.default_generator


def get_rng_state() -> torch.Tensor:
    """Returns a copy of the state of torch's default CPU generator."""
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Restores the state of torch's default CPU generator."""
    torch.default_generator.set_state(state)


def is_equal_rng_state(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two states of the generator are equal."""
    return bytes(one.numpy()) == bytes(other.numpy())


def seed_rng(seed: int) -> None:
    """Seeds torch's default CPU generator."""
    torch.default_generator.manual_seed(seed)


def get_num_threads() -> int:
    """Returns the number of threads that compute one torch operation."""
    return torch.get_num_threads()


def set_num_threads(count: int) -> None:
    """Sets the number of threads that compute one torch operation."""
    torch.set_num_threads(count)


def to_numpy(array: torch.Tensor) -> Any:
    """Returns a numpy copy of a tensor; raises TypeError for a dtype that numpy lacks, such as bfloat16."""
    return array.detach().cpu().numpy().copy()


def to_bytes(array: torch.Tensor) -> Any:
    """Returns the tensor's bytes as a numpy array of uint8."""
    return array.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def from_numpy(array: Any) -> torch.Tensor:
    """Returns a tensor with a copy of this array."""
    return torch.from_numpy(np.array(array))
