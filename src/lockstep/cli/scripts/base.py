"""The scripts of one framework: Lockstep's, and the framework's own for comparison."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """The same training with the framework's own data parallelism: name, unit of parallelism, file name and text."""

    title: str
    units: str
    file: str
    text: str


@dataclass(frozen=True)
class Scripts:
    """`train` is the same text as examples/`file`; `verify` defines `make_trainer`."""

    file: str
    train: str
    verify: str
    peer: Peer
