"""Two hosts with two processes each: the digest of one process, and sentences where the network is wrong."""

import os
import sys

import pytest

from launchers.conftest import SCRIPT, read_results, require, run_together
from launchers.namespaces import ADDRESSES, two_hosts

require("ip", package="iproute2")
if os.getuid() != 0:
    pytest.skip("only root may create network namespaces", allow_module_level=True)


@pytest.fixture(scope="module")
def hosts():
    with two_hosts() as prefixes:
        yield prefixes


def list_variables(address):
    shared = {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": 29500}
    return [{**shared, "RANK": index, "LOCAL_RANK": index % 2} for index in range(4)]


def test_four_processes_on_two_hosts(hosts, digest):
    """Nothing names an interface, and /etc/hosts may lead the host's own name to a loopback address."""
    commands = [[*hosts[index // 2], sys.executable, SCRIPT] for index in range(4)]
    ends = run_together(commands, list_variables(ADDRESSES[0]))
    assert [code for code, _ in ends] == [0] * 4, ends
    assert [read_results(output) for _, output in ends] == [[(4, digest)]] * 4


def test_torchrun_on_two_hosts(hosts, digest):
    options = ["--nnodes", 2, "--nproc-per-node", 1, "--master-addr", ADDRESSES[0], "--master-port", 29501]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
    commands = [[*host, *torchrun, "--node-rank", index, SCRIPT] for index, host in enumerate(hosts)]
    ends = run_together(commands, [{}] * 2)
    assert [code for code, _ in ends] == [0, 0], ends
    assert [read_results(output) for _, output in ends] == [[(2, digest)]] * 2


def test_a_wrong_address_is_named(hosts):
    variables = [{**own, "LOCKSTEP_WORKER_TIMEOUT": 4} for own in list_variables("10.79.0.9")]
    commands = [[*hosts[index // 2], sys.executable, SCRIPT] for index in range(4)]
    ends = run_together(commands, variables)
    assert all(code for code, _ in ends)
    for index in (1, 2, 3):
        assert f"Process {index} of 4 cannot reach process 0" in ends[index][1]
    assert "Processes 1, 2, 3 of 4 have not come to where the processes meet." in ends[0][1]
