"""The world: the processes that train one model together.

A *team* is how this process reaches the others. There are three: alone, with
workers of our own (a crew), or joined to processes that somebody else launched.
Whatever the team, a method runs on every member over its own part of the batch.
"""

from lockstep.world.alone import Alone
from lockstep.world.crew import Crew
from lockstep.world.team import Team

__all__ = ["Alone", "Crew", "Team"]
