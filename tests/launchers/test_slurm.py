"""SLURM: a cluster of one node in a temporary folder, with a munge of its own."""

import os
import platform
import re
import subprocess
import sys
import time

import pytest

from launchers.conftest import SCRIPT, find_free_port, read_results, require, run

require("srun", "slurmctld", "slurmd", "munged", package="slurm-wlm munge")
if os.getuid() != 0:
    pytest.skip("slurmd starts jobs only as root", allow_module_level=True)

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The variable that leads Slurm's commands to the cluster."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "spool").mkdir()
    key, file = folder / "munge.key", folder / "slurm.conf"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    ports = [find_free_port(), find_free_port()]
    host = platform.node().partition(".")[0]
    file.write_text(CONFIGURATION.format(host=host, ports=ports, folder=folder))
    places = {"--socket": "socket", "--pid-file": "pid", "--log-file": "log", "--seed-file": "seed"}
    munge = ["munged", "--foreground", "--force", f"--key-file={key}"]
    munge += [f"{option}={folder}/munge.{name}" for option, name in places.items()]
    commands = [munge, ["slurmctld", "-D", "-f", str(file)], ["slurmd", "-D", "-f", str(file), "-N", host]]
    daemons = []
    with (folder / "output").open("w") as output:
        for command in commands:
            daemons.append(subprocess.Popen(command, stdout=output, stderr=output))
            time.sleep(0.5)
    try:
        wait_until_idle(file, folder / "output")
        yield {"SLURM_CONF": file}
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(timeout=30)


def wait_until_idle(file, output):
    deadline = time.monotonic() + 30
    while "idle" not in run(["sinfo", "--noheader", "-o", "%t"], SLURM_CONF=file)[1]:
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.2)


def test_srun(slurm, digest):
    code, output = run(["srun", "-n", 2, sys.executable, SCRIPT], **slurm)
    assert code == 0, output
    assert read_results(output) == [(2, digest)] * 2


def test_srun_in_a_batch_script(slurm, digest, tmp_path):
    """The batch script itself is one process that trains alone; its srun is a world, and so is mpirun's."""
    job = tmp_path / "job.sh"
    job.write_text(f"#!/bin/sh\n{sys.executable} {SCRIPT}\nsrun {sys.executable} {SCRIPT}\n")
    code, output = run(["sbatch", "--wait", "-n", 2, "-o", tmp_path / "output", job], **slurm)
    assert code == 0, output
    assert read_results((tmp_path / "output").read_text()) == [(1, digest), (2, digest), (2, digest)]


def test_torchrun_inside_srun(slurm, digest):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    code, output = run(["srun", "-n", 1, *torchrun, SCRIPT], **slurm)
    assert code == 0, output
    assert read_results(output) == [(2, digest)] * 2


def test_a_process_that_ends_before_it_comes_stops_all(slurm, tmp_path):
    script = tmp_path / "early.py"
    script.write_text(f"import os\nif os.environ['SLURM_PROCID'] == '0':\n    exec(open({str(SCRIPT)!r}).read())\n")
    code, output = run(["srun", "-n", 2, sys.executable, script], LOCKSTEP_WORKER_TIMEOUT=3, **slurm)
    assert code != 0
    assert re.search(r"Process 1 of 2 has not come to where the processes meet\. Waited 3 seconds\.", output)


def test_a_requeued_job_continues_exactly(slurm, digest, tmp_path):
    """What `sbatch --requeue` does after a failure, here by a second job: the same command goes on."""
    script = [
        sys.executable,
        SCRIPT,
        "--checkpoint",
        tmp_path / "checkpoint",
        "--die",
        tmp_path / "died",
        "--pause",
        0.1,
    ]
    code, output = run(["srun", "--kill-on-bad-exit=1", "-n", 2, *script], **slurm)
    assert code != 0
    code, output = run(["srun", "--kill-on-bad-exit=1", "-n", 2, *script], **slurm)
    assert code == 0, output
    assert read_results(output) == [(2, digest)] * 2
    assert "epoch 0" not in output
