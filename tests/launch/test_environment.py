"""The place of a process, read from the variables of torchrun, SLURM and MPI."""

import os
import re
from pathlib import Path

import pytest

from lockstep.errors import DeviceError, LaunchError
from lockstep.launch import environment, slurm
from lockstep.launch.environment import ProcessPlace

LAUNCHED = "other variables say that a launcher started this process:"
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2),1",
    "SLURM_JOB_NODELIST": "node[03-05]",
}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI", "MPI_")) or name in TORCHRUN:
            monkeypatch.delenv(name)


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is not None:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, None),
        (TORCHRUN, ProcessPlace(3, 4, 1, 2, "10.0.0.7", 29500)),
        # A world of one process counts if a launcher started it, but not if only WORLD_SIZE=1 is set.
        (
            {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            ProcessPlace(0, 1, 0, 1, "10.0.0.7", 29500),
        ),
        ({"WORLD_SIZE": "1"}, None),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, None),
        (SRUN, ProcessPlace(5, 9, 1, 4, "node03", 22041)),
        (
            {**SRUN, "SLURM_PROCID": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"},
            ProcessPlace(8, 9, 0, 1, "node03", 22041),
        ),
        # torchrun inside srun: the inner launcher is the one that started this process.
        ({**SRUN, **TORCHRUN}, ProcessPlace(3, 4, 1, 2, "10.0.0.7", 29500)),
        # A step that uses a part of the job: the variables of the step take precedence.
        (
            {
                **SRUN,
                "SLURM_STEP_ID": "2",
                "SLURM_PROCID": "1",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_TASKS_PER_NODE": "2",
                "SLURM_STEP_NODELIST": "node04",
            },
            ProcessPlace(1, 2, 1, 2, "node04", 22043),
        ),
        ({**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "1234"}, ProcessPlace(5, 9, 1, 4, "head", 1234)),
        (
            {**SRUN, "SLURM_JOB_NODELIST": None, "SLURM_LAUNCH_NODE_IPADDR": "10.1.2.3"},
            ProcessPlace(5, 9, 1, 4, "10.1.2.3", 22041),
        ),
        (
            {**SRUN, "SLURM_TASKS_PER_NODE": None, "SLURM_NTASKS_PER_NODE": "3", "SLURM_NODEID": None},
            ProcessPlace(5, 9, 1, 3, "node03", 22041),
        ),
        ({**SRUN, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        # Not started by srun, or started as a shell: salloc, sbatch, an interactive step, srun --pty.
        ({**SRUN, "SLURM_STEP_ID": None}, None),
        ({**SRUN, "SLURM_PROCID": None}, None),
        ({**SRUN, "SLURM_STEP_ID": "4294967290"}, None),
        ({**SRUN, "SLURM_STEP_ID": "4294967291"}, None),
        ({**SRUN, "SLURM_PTY_PORT": "40001"}, None),
    ],
)
def test_the_place_in_a_launched_world(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str | None], place: ProcessPlace | None
) -> None:
    set_all(monkeypatch, variables)
    assert environment.find_place() == place


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, f"WORLD_SIZE is not set, but {LAUNCHED} RANK=0"),
        ({"WORLD_SIZE": "4"}, f"RANK is not set, but {LAUNCHED} WORLD_SIZE=4"),
        (
            {**TORCHRUN, "LOCAL_RANK": None},
            f"LOCAL_RANK is not set, but {LAUNCHED} RANK=3, WORLD_SIZE=4",
        ),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": None}, "LOCAL_WORLD_SIZE is not set"),
        ({**TORCHRUN, "MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({**TORCHRUN, "MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({**TORCHRUN, "RANK": "first"}, "RANK must be an integer. Got RANK='first'"),
        ({**TORCHRUN, "WORLD_SIZE": "4.0"}, "WORLD_SIZE must be an integer. Got WORLD_SIZE='4.0'"),
        (
            {**TORCHRUN, "RANK": "4"},
            "rank 4 in a world of 4 processes, whose ranks are 0 to 3. Correct RANK and WORLD_SIZE",
        ),
        ({**TORCHRUN, "RANK": "-1"}, "rank -1 in a world of 4"),
        (
            {**TORCHRUN, "LOCAL_RANK": "2"},
            "local rank 2 of 2 processes on this host, in a world of 4 processes. Correct LOCAL_RANK",
        ),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "local rank 1 of 8 processes on this host, in a world of 4"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port number"),
        (
            {**SRUN, "SLURM_NTASKS": None},
            f"SLURM_STEP_NUM_TASKS or SLURM_NTASKS is not set, but {LAUNCHED} SLURM_PROCID=5",
        ),
        ({**SRUN, "SLURM_LOCALID": None}, "SLURM_LOCALID is not set"),
        ({**SRUN, "SLURM_TASKS_PER_NODE": "4*2"}, "SLURM_TASKS_PER_NODE must be a list of counts such as '4(x2),1'"),
        ({**SRUN, "SLURM_JOB_NODELIST": "node[03"}, "SLURM_JOB_NODELIST must be a list of hosts"),
        ({**SRUN, "SLURM_NODEID": "3"}, "SLURM_NODEID=3 does not fit the 3 nodes that SLURM lists tasks for (4, 4, 1)"),
    ],
)
def test_inconsistent_variables_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str | None], message: str
) -> None:
    set_all(monkeypatch, variables)
    with pytest.raises(LaunchError, match=re.escape(message)):
        environment.find_place()


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[03-05,7]", "node03"),
        ("node[7,03-05]", "node7"),
        ("gpu-a[1-2],node[03-05]", "gpu-a1"),
        ("rack[2-3]-node[10-11]", "rack2-node10"),
        ("node[03-05]-ib.cluster.example", "node03-ib.cluster.example"),
        ("10.1.2.3", "10.1.2.3"),
        ("fe80::1", "fe80::1"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert slurm.parse_first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", ",node1", "node[", "node[]", "a b"])
def test_text_that_is_no_host_list(nodes: str) -> None:
    with pytest.raises(ValueError, match="a list of hosts"):
        slurm.parse_first_host(nodes)


@pytest.mark.parametrize(("counts", "tasks"), [("2", [2]), ("2(x3)", [2, 2, 2]), ("2(x2),1,3", [2, 2, 1, 3])])
def test_tasks_per_node(counts: str, tasks: list[int]) -> None:
    assert slurm.parse_tasks_per_node(counts) == tasks


def test_ports_are_below_the_kernels_ephemeral_range() -> None:
    ports = {slurm.choose_port(job, step) for job in range(0, 5_000_000, 997) for step in (0, 1, 500)}
    assert min(ports) >= 20000
    assert max(ports) < 32768


def test_cache_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere/cache")
    assert environment.find_cache_home() == Path("/somewhere/cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says: ignore it
    assert environment.find_cache_home() == Path.home() / ".cache"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert environment.find_cache_home() == Path.home() / ".cache"


def test_set_default_does_not_overwrite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST_A", "theirs")
    monkeypatch.setenv("LOCKSTEP_TEST_B", "")  # so that it is put back to unset
    monkeypatch.delenv("LOCKSTEP_TEST_B")
    assert environment.set_default("LOCKSTEP_TEST_A", "ours") == "theirs"
    assert environment.set_default("LOCKSTEP_TEST_B", "ours") == "ours"
    assert os.environ["LOCKSTEP_TEST_B"] == "ours"


def test_workers_do_not_look_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {**TORCHRUN, **SRUN, "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1"})
    theirs = environment.build_worker_environment()
    assert theirs.keys().isdisjoint(TORCHRUN)
    assert "TORCHELASTIC_RUN_ID" not in theirs
    assert theirs["OMP_NUM_THREADS"] == "1"
    assert theirs["SLURM_JOB_ID"] == "4711"
    monkeypatch.setattr(os, "environ", theirs)
    assert environment.find_place() is None


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1398865921",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "1234"}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (OPEN_MPI, ProcessPlace(1, 2, 1, 2, "127.0.0.1", 20933)),
        ({**OPEN_MPI, **MASTER}, ProcessPlace(1, 2, 1, 2, "node1", 1234)),
        ({**OPEN_MPI, **MASTER, "OMPI_COMM_WORLD_SIZE": "4"}, ProcessPlace(1, 4, 1, 2, "node1", 1234)),
        # mpirun started by srun, or inside an allocation: SLURM's variables count mpirun's helpers.
        ({**SRUN, **OPEN_MPI}, ProcessPlace(1, 2, 1, 2, "127.0.0.1", 20933)),
        ({**MPICH, **MASTER}, ProcessPlace(1, 2, 1, 2, "node1", 1234)),
        # srun --mpi=pmi2 or pmix: SLURM's own variables are complete.
        ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "9"}, ProcessPlace(5, 9, 1, 4, "node03", 22041)),
        ({**SRUN, "PMIX_RANK": "5"}, ProcessPlace(5, 9, 1, 4, "node03", 22041)),
        (
            {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "3", "MV2_COMM_WORLD_LOCAL_RANK": "0"}
            | {"MV2_COMM_WORLD_LOCAL_SIZE": "1", **MASTER},
            ProcessPlace(1, 3, 0, 1, "node1", 1234),
        ),
        (
            {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "3", "JSM_NAMESPACE_LOCAL_RANK": "0"}
            | {"JSM_NAMESPACE_LOCAL_SIZE": "1", **MASTER},
            ProcessPlace(1, 3, 0, 1, "node1", 1234),
        ),
        (
            {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2", **MASTER},
            ProcessPlace(1, 2, 1, 2, "node1", 1234),
        ),
        # A world of one process counts as not launched.
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}, None),
        ({**MPICH, "PMI_SIZE": "1", "PMI_RANK": "0"}, None),
        ({**SRUN, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "PMIX_RANK": "0"}, None),
    ],
)
def test_mpirun(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: ProcessPlace | None) -> None:
    set_all(monkeypatch, variables)
    assert environment.find_place() == place


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (MPICH, "no common address. This is process 1 of 2 (PMI_RANK=1, PMI_SIZE=2). Set MASTER_ADDR and MASTER_PORT"),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"},
            "This is process 1 of 4 (OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE",
        ),
        (
            {**OPEN_MPI, "MASTER_ADDR": "node1"},
            f"MASTER_PORT is not set, but {LAUNCHED} OMPI_COMM_WORLD_RANK=1",
        ),
        (
            {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1"},
            "To train in each process alone, uns",
        ),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, "This is process 1 of 2 (HOROVOD_RANK=1, HOROVOD_SIZE=2"),
        ({"PALS_RANKID": "1", "PMI_RANK": "1", "PMI_SIZE": "2"}, "This is process 1 of 2 (PALS_RANKID=1, PMI_SIZE=2"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "This process was launched through PMI (PMI_RANK=1, PMI_SIZE=2), which"),
        ({"PMIX_RANK": "0"}, "This process was launched through PMI (PMIX_RANK=0), which does not say how many"),
    ],
)
def test_mpirun_without_a_rendezvous_address(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    set_all(monkeypatch, variables)
    with pytest.raises(LaunchError, match=re.escape(message)):
        environment.find_place()


def test_workers_do_not_look_launched_by_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {**OPEN_MPI, **MPICH, "HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"})
    monkeypatch.setattr(os, "environ", environment.build_worker_environment())
    assert environment.find_place() is None


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("", None),
        (" 2 ", 2),
        ("cpu", ["cpu"]),
        ("cuda:0, cuda:1", ["cuda:0", "cuda:1"]),
    ],
)
def test_devices(monkeypatch: pytest.MonkeyPatch, text: str, devices: int | list[str] | None) -> None:
    monkeypatch.setenv("LOCKSTEP_DEVICES", text)
    assert environment.read_devices() == devices


@pytest.mark.parametrize(
    "text",
    [
        *("0", "-1", "2.5", "1e3", "\N{SUPERSCRIPT TWO}", "9" * 5000),  # the last is too long for int()
        *("0,1", "cpu:0,", ",", ":0", "['cpu']"),
    ],
)
def test_text_that_is_neither_a_number_nor_names_of_devices(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LOCKSTEP_DEVICES", text)
    message = (
        "LOCKSTEP_DEVICES must be a number of devices, 1 or more, or comma-separated device names. Got "
        f"LOCKSTEP_DEVICES={text!r:.100}. Use for example LOCKSTEP_DEVICES=2 or LOCKSTEP_DEVICES=cpu:0,cpu:1, or "
        "unset it to use the default."
    )
    with pytest.raises(DeviceError, match=f"^{re.escape(message)}$"):
        environment.read_devices()
