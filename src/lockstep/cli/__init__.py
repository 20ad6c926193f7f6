"""The command line: `lockstep demo`, `lockstep devices`, `lockstep doctor`, `lockstep verify`."""

from lockstep.cli.app import main

__all__ = ["main"]
