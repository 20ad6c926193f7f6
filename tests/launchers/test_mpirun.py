"""Open MPI: `mpirun` on one host is joined as it is."""

import sys

from launchers.conftest import SCRIPT, find_free_port, read_results, require, run

require("mpirun", package="openmpi-bin")

MPIRUN = ["mpirun", "-n", 2, "--allow-run-as-root", "--oversubscribe"]


def test_mpirun(digest):
    code, output = run([*MPIRUN, sys.executable, SCRIPT])
    assert code == 0, output
    assert read_results(output) == [(2, digest)] * 2


def test_mpirun_with_an_address(digest):
    address = ["-x", "MASTER_ADDR=localhost", "-x", f"MASTER_PORT={find_free_port()}"]
    code, output = run([*MPIRUN, *address, sys.executable, SCRIPT])
    assert code == 0, output
    assert read_results(output) == [(2, digest)] * 2


def test_a_process_that_ends_before_it_comes_stops_all(tmp_path):
    script = tmp_path / "early.py"
    first = "os.environ['OMPI_COMM_WORLD_RANK'] == '0'"
    script.write_text(f"import os\nif {first}:\n    exec(open({str(SCRIPT)!r}).read())\n")
    code, output = run([*MPIRUN, sys.executable, script], LOCKSTEP_WORKER_TIMEOUT=3)
    assert code != 0
    assert "Process 1 of 2 has not come to where the processes meet. Waited 3 seconds." in output
