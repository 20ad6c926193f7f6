"""`python -m lockstep` is the command line."""

from lockstep.cli import main

main()
