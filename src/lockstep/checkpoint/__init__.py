"""Checkpoints: what a run is at one moment, on the disk, whole or not at all."""

from lockstep.checkpoint.arrays import load_arrays
from lockstep.checkpoint.format import Snapshot, read, write
from lockstep.checkpoint.schedule import Checkpoint
from lockstep.checkpoint.store import Found, Store, find
from lockstep.checkpoint.writer import Writer

__all__ = ["Checkpoint", "Found", "Snapshot", "Store", "Writer", "find", "load_arrays", "read", "write"]
