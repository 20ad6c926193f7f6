"""The scripts of one framework: Lockstep's, and one with the framework's own data parallelism, for comparison."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """The script for the same training with the framework's own data parallelism, and what the table calls it."""

    title: str
    units: str
    file: str
    text: str


@dataclass(frozen=True)
class Scripts:
    """The scripts of one framework. `train` is the same text as examples/`file`; `verify` defines `make_trainer`."""

    file: str
    train: str
    verify: str
    peer: Peer
