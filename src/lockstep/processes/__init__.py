"""The processes that train one model together.

A *team* is how this process reaches the others. There are three: alone, with
workers that this script started, or processes that a launcher started.
Whatever the team, a method runs on every member over its own part of the batch.
"""

from lockstep.processes.base import Team
from lockstep.processes.local_workers import LocalWorkers
from lockstep.processes.single_process import SingleProcess

__all__ = ["LocalWorkers", "SingleProcess", "Team"]
