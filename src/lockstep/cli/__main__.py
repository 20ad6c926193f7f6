"""`python -m lockstep.cli` is the command line too."""

from lockstep.cli import main

main()
