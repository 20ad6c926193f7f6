"""Exhaustive exploration of a model: every state that can be reached, breadth-first.

A model has `list_moves(state)`, which yields (what happens, whether it is a fault, the state after it), `check(state)`,
which raises `Violation`, and `is_final(state)`. States can be hashed.
"""

from collections import defaultdict
from dataclasses import dataclass


class Violation(Exception):
    """A reachable state, or a move, that has to be impossible."""


def require(holds, otherwise):
    """Raises `Violation` unless the condition holds."""
    if not holds:
        raise Violation(otherwise)


@dataclass
class Exploration:
    """What was found: the number of states, and a shortest way to the first violation, if there is one."""

    num_states: int
    violation: str = ""
    moves: tuple[str, ...] = ()


def explore(model, start):
    """Visits every state that can be reached from `start`, until one violates what the model requires.

    Also a violation: a state from which the system may never come to an end although no further fault happens, because
    no move is possible, or because moves repeat for ever.
    """
    origins, queue, parents, num_open = {start: None}, [start], defaultdict(list), {}
    for state in queue:
        num_open[state] = 0
        try:
            model.check(state)
            for label, is_fault, after in model.list_moves(state):
                if after == state:
                    continue
                if after not in origins:
                    origins[after] = state, label
                    queue.append(after)
                if not is_fault:
                    num_open[state] += 1
                    parents[after].append(state)
            require(num_open[state] or model.is_final(state), "nothing can happen any more, and the work is not done")
        except Violation as violation:
            return Exploration(len(origins), str(violation), _list_labels(origins, state))
    # Take away the final states, then those whose every move leads to one that was taken away, and so on.
    ending = [state for state in queue if not num_open[state]]
    for state in ending:
        for parent in parents[state]:
            num_open[parent] -= 1
            if not num_open[parent]:
                ending.append(parent)
    if len(ending) < len(queue):
        endless = next(state for state in queue if num_open[state])
        return Exploration(len(queue), "the same moves can repeat for ever", _list_labels(origins, endless))
    return Exploration(len(queue))


def _list_labels(origins, state):
    labels = []
    while origins[state] is not None:
        state, label = origins[state]
        labels.append(label)
    return tuple(reversed(labels))
