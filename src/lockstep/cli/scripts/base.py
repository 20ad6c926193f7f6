"""What the command line trains with a framework, and what it compares with."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """The same training as the framework's users write it: how it is called, what it runs on, its file and text."""

    title: str
    units: str
    file: str
    text: str


@dataclass(frozen=True)
class Scripts:
    """A framework's scripts: `train` is the example of the name `file`, to the letter; `verify` has `make_trainer`."""

    file: str
    train: str
    verify: str
    peer: Peer
