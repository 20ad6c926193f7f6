"""Runs the command line as `python -m lockstep.cli`."""

from lockstep.cli import main

main()
