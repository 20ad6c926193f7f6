"""Scripts that the command line runs, as text.

They are text and not modules, so that no framework is imported here, and the text that is shown is what was run.
"""

import importlib

from lockstep.cli.scripts.base import Peer, Scripts

__all__ = ["Peer", "Scripts", "load_scripts"]


def load_scripts(framework: str) -> Scripts:
    """Returns the scripts for this framework."""
    scripts: Scripts = importlib.import_module(f"lockstep.cli.scripts.{framework}").SCRIPTS
    return scripts
