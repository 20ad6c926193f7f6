"""Checkpoints: what a run is at one moment, on the disk, whole or not at all."""

from lockstep.checkpoint.background_writer import Writer
from lockstep.checkpoint.config import Checkpoint
from lockstep.checkpoint.format import Snapshot, read, write
from lockstep.checkpoint.load_arrays import load_arrays
from lockstep.checkpoint.store import Found, Store, find

__all__ = ["Checkpoint", "Found", "Snapshot", "Store", "Writer", "find", "load_arrays", "read", "write"]
