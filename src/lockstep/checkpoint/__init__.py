"""Writes and reads checkpoints: the state of a run in a folder that is always complete."""

from lockstep.checkpoint.background_writer import Writer
from lockstep.checkpoint.checkpoint_folder import CheckpointFolder, Newest, load_arrays, read_newest
from lockstep.checkpoint.format import Snapshot, read, write
from lockstep.checkpoint.save_options import Checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointFolder",
    "Newest",
    "Snapshot",
    "Writer",
    "load_arrays",
    "read",
    "read_newest",
    "write",
]
