"""Parser of TF_CONFIG, the variable with which TensorFlow's multi-worker jobs are launched.

The parser takes a string and returns values; `environment` reads the variable.
"""

import json
import zlib
from typing import Any

from lockstep.launch.slurm import FIRST_PORT, NUM_PORTS

Place = tuple[int, int, int, int, str, int]
"""Index, number of processes, index and number on this host, and the rendezvous address and port."""


def parse_place(text: str) -> Place:
    """Returns the place of this process; the chief comes first, then the workers in their order.

    The rendezvous port is derived from the cluster, so that it is equal in all processes: TensorFlow's servers may
    already listen on the ports that the cluster names.

    >>> one = '{"cluster": {"worker": ["a:1", "a:2", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    >>> parse_place(one)[:5]
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
        raise ValueError("a job that has only workers: parameter servers and evaluators are not supported")
    index += len(cluster.get("chief", [])) if kind == "worker" else 0
    hosts = [str(address).rpartition(":")[0] for address in addresses]
    if not 0 <= index < len(hosts):
        raise ValueError(f"a task with an index below the cluster's {len(hosts)} processes")
    own = hosts[index]
    return index, len(hosts), hosts[:index].count(own), hosts.count(own), hosts[0], _port(cluster)


def _port(cluster: Any) -> int:
    return FIRST_PORT + zlib.crc32(json.dumps(cluster, sort_keys=True).encode()) % NUM_PORTS
