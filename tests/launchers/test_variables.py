"""Processes that were started by hand: plain variables, TF_CONFIG and jax.distributed."""

import json
import sys

import pytest

from launchers.conftest import SCRIPT, find_free_port, read_results, run, run_together

COUNT = 2


def list_plain():
    shared = {"WORLD_SIZE": COUNT, "LOCAL_WORLD_SIZE": COUNT, "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = find_free_port()
    return [{**shared, "RANK": index, "LOCAL_RANK": index} for index in range(COUNT)]


def list_tf_config():
    workers = [f"localhost:{find_free_port()}" for _ in range(COUNT)]
    tasks = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}} for index in range(COUNT)]
    return [{"TF_CONFIG": json.dumps(task)} for task in tasks]


@pytest.mark.parametrize("launcher", [list_plain, list_tf_config])
@pytest.mark.parametrize("order", [1, -1])
def test_variables(launcher, order, digest):
    """In either order: the first process may come last."""
    ends = run_together([[sys.executable, SCRIPT]] * COUNT, launcher()[::order])
    assert [code for code, _ in ends] == [0, 0], ends
    assert [read_results(output) for _, output in ends] == [[(2, digest)]] * 2


def test_jax_distributed(digest, tmp_path):
    pytest.importorskip("jax")
    script = tmp_path / "with_jax.py"
    script.write_text(
        "import sys, jax\njax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))\n"
        f"sys.argv = sys.argv[:1]\nexec(open({str(SCRIPT)!r}).read())\n"
    )
    address = f"127.0.0.1:{find_free_port()}"
    ends = run_together([[sys.executable, script, address, index] for index in range(COUNT)], [{}] * COUNT)
    assert [code for code, _ in ends] == [0, 0], ends
    assert [read_results(output) for _, output in ends] == [[(2, digest)]] * 2


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("MASTER_ADDR", "MASTER_ADDR is not set, but other variables say that a launcher started this process"),
        ("LOCAL_RANK", "LOCAL_RANK is not set, but"),
        ("WORLD_SIZE", "WORLD_SIZE is not set, but"),
    ],
)
def test_a_missing_variable_is_named(missing, message):
    variables = list_plain()[0]
    del variables[missing]
    code, output = run([sys.executable, SCRIPT], **variables)
    assert code != 0
    assert message in output


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (0, "Process 1 of 2 has not come to where the processes meet. Waited 2 seconds."),
        (1, "Process 1 of 2 cannot reach process 0, which listens when it calls lockstep.wrap, at 127.0.0.1:"),
    ],
)
def test_a_process_that_never_comes_is_named(index, message):
    code, output = run([sys.executable, SCRIPT], LOCKSTEP_WORKER_TIMEOUT=2, **list_plain()[index])
    assert code != 0
    assert message in output
