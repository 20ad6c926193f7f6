"""JAX, on two CPU devices where the process has them."""

import jax
import jax.numpy as jnp
import numpy as np

from collectives.kit import Kit


def place(array):
    (device,) = array.devices()
    return str(device)


def slope(param):
    return jax.grad(lambda param: (param * param).sum())(param)


def devices():
    found = [str(device) for device in jax.local_devices(backend="cpu")]
    return (found * 2)[:2]


KITS = {"jax": Kit(jnp.asarray, jnp.asarray, np.asarray, slope, place, devices, in_place=False)}
