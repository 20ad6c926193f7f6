"""Scripts: what the command line trains, as the text of files that Python runs.

Text, and not modules, so that no framework is imported here and so that what a
user is shown is what was run.
"""

import importlib

from lockstep.cli.scripts.base import Peer, Scripts

__all__ = ["Peer", "Scripts", "of"]


def of(framework: str) -> Scripts:
    """The scripts for this framework."""
    found: Scripts = importlib.import_module(f"lockstep.cli.scripts.{framework}").SCRIPTS
    return found
