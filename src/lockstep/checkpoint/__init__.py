"""Writes and reads checkpoints: the state of a run in a folder that is always complete."""

from lockstep.checkpoint.background_writer import Writer
from lockstep.checkpoint.format import Snapshot, read, write
from lockstep.checkpoint.save_options import Checkpoint
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
