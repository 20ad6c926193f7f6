"""Parsers of SLURM's compact notation for host lists and tasks per node.

The parsers take a string and return values; `environment` reads the variables. So each form that SLURM writes can be
tested as one row of a table.
"""

import re

# SLURM numbers its real steps from 0; the batch script, an interactive shell and their like sit at the top of 32 bits.
FIRST_RESERVED_STEP = 0xFFFFFFF0

# Below the range from which the kernel takes ports for outgoing connections (32768 and up).
FIRST_PORT, NUM_PORTS = 20000, 12000


def parse_first_host(nodes: str) -> str:
    """Returns the first host of a node list.

    >>> parse_first_host("node[03-05,7],login1")
    'node03'
    """
    # Commas inside brackets separate numbers, others separate hosts: the first host ends at the first bare comma.
    first = re.match(r"((?:[^,\[\]]|\[[^\[\]]+\])+)(?:,|$)", nodes.strip())
    host = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[1] if first else "")
    if not re.fullmatch(r"[\w.:-]+", host):
        raise ValueError("a list of hosts such as 'node[03-05,7]'")
    return host


def parse_tasks_per_node(counts: str) -> list[int]:
    """Returns the number of tasks of each node.

    >>> parse_tasks_per_node("4(x2),1")
    [4, 4, 1]
    """
    result: list[int] = []
    for part in counts.split(","):
        form = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if form is None:
            raise ValueError("a list of counts such as '4(x2),1'")
        result += [int(form[1])] * int(form[2] or 1)
    return result


def choose_port(job: int, step: int) -> int:
    """Returns the rendezvous port of a SLURM job step, computed from both numbers, so that all of its processes agree.

    >>> choose_port(4711, 0)
    22041
    """
    return FIRST_PORT + (job * 31 + step) % NUM_PORTS
