"""Snapshots to save, and ways to look at what came of them."""

import json
import os
import re

import ml_dtypes
import numpy as np

from lockstep.checkpoint import Snapshot, json_codec, manifest
from lockstep.checkpoint.io import MANIFEST
from lockstep.core.types import Array

DTYPES = ["bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]
DTYPES += ["float16", "float32", "float64", "complex64", "complex128"]


def snapshot(step=3, **facts):
    """A small run of every kind of array."""
    state = {
        "model.layer.weight": Array(np.arange(6, dtype="float32").reshape(2, 3) + np.float32(step), "float32"),
        "model.layer.bias": Array(np.array([0x3FC0, -1], "int16").view(ml_dtypes.bfloat16), "bfloat16"),
        "model.count": Array(np.asarray(step), "int64"),
        "optimizer.layer.weight.exp_avg": Array(np.array([-0.0, np.nan, np.inf]), "float64"),
        "optimizer.layer.weight.step": Array(np.asarray(7), "python"),
        "optimizer.layer.weight.beta": Array(np.asarray(0.9), "python"),
        "buffers.empty": Array(np.empty((0, 3), "uint8"), "uint8"),
        "loss.phase": Array(np.array([1 + 2j]), "complex128"),
    }
    return Snapshot(state, {"step": step, "logs": {"val_loss": 1 / (step + 1)}, "mean": np.ones(2, "f2"), **facts})


def same(left, right):
    """Whether two nests are equal in type and value, to the bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, float):
        return json_codec.encode(left) == json_codec.encode(right) and str(left) == str(right)  # -0.0 == 0.0
    return left == right


def equal(left, right):
    """Whether two snapshots are the same."""
    return same(left.state, right.state) and same(left.facts, right.facts)


def content(folder):
    """A manifest's content, whatever its checksum."""
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def forge(folder, text):
    """Puts another manifest there, with the checksum it should have."""
    (folder / MANIFEST).write_bytes(sealed(text))


def sealed(text):
    """The text with the checksum it should have."""
    blank = "0" * 64
    text = re.sub('"checksum": "[^"]*"', f'"checksum": "{blank}"', text, count=1)
    checksum = manifest.hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return text.replace(blank, checksum, 1).encode("utf-8", "surrogatepass")


def litter(folder):
    """The dot names in a folder, the lock aside."""
    return [name for name in os.listdir(folder) if name.startswith(".") and name != ".lock"]
