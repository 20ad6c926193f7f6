"""Checkpoints: the state of a run in a folder, written whole or not at all."""

from lockstep.checkpoint.background_writer import Writer
from lockstep.checkpoint.config import Checkpoint
from lockstep.checkpoint.format import Snapshot, read, write
from lockstep.checkpoint.store import Newest, Store, load_arrays, read_newest

__all__ = [
    "Checkpoint",
    "Newest",
    "Snapshot",
    "Store",
    "Writer",
    "load_arrays",
    "read",
    "read_newest",
    "write",
]
