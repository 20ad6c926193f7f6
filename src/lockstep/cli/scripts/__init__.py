"""The scripts that the command line runs, as text.

They are text and not modules, so that no framework is imported here, and so that the text that is shown is the text
that runs.
"""

import importlib

from lockstep.cli.scripts.base import Peer, Scripts

__all__ = ["Peer", "Scripts", "load_scripts"]


def load_scripts(framework: str) -> Scripts:
    """Returns the scripts of this framework."""
    scripts: Scripts = importlib.import_module(f"lockstep.cli.scripts.{framework}").SCRIPTS
    return scripts
