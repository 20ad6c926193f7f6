"""TF_CONFIG: the variable with which TensorFlow's multi-worker jobs are launched, spelled out.

Only text comes in and only values go out; who reads the variable is `environment`.
"""

import json
import zlib
from typing import Any

from lockstep.launch.slurm import FIRST_PORT, NUM_PORTS

Place = tuple[int, int, int, int, str, int]
"""A process's index, the number of processes, both on its host alone, and where they meet."""


def place(text: str) -> Place:
    """The place of this process; the chief is the first, then the workers in their order.

    The processes meet on a port of their own, the same in each: TensorFlow's servers may
    already listen on theirs.

    >>> one = '{"cluster": {"worker": ["a:1", "a:2", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    >>> place(one)[:5]
    (1, 3, 1, 2, 'a')
    """
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        addresses = [*cluster.get("chief", []), *cluster["worker"]]
        kind, index = task["type"], int(task["index"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("a JSON object with a cluster of workers and a task") from None
    if kind not in ("chief", "worker") or "ps" in cluster:
        raise ValueError("a job of workers alone: parameter servers and evaluators take no part")
    index += len(cluster.get("chief", [])) if kind == "worker" else 0
    hosts = [str(address).rpartition(":")[0] for address in addresses]
    if not 0 <= index < len(hosts):
        raise ValueError(f"a task that is one of its cluster's {len(hosts)}")
    own = hosts[index]
    return index, len(hosts), hosts[:index].count(own), hosts.count(own), hosts[0], _port(cluster)


def _port(cluster: Any) -> int:
    return FIRST_PORT + zlib.crc32(json.dumps(cluster, sort_keys=True).encode()) % NUM_PORTS
