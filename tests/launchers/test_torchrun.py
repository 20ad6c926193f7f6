"""torchrun: static and c10d rendezvous, restarts, and nodes that leave and come back."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from launchers.conftest import SCRIPT, SECONDS, find_free_port, read_results, run, run_together

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
C10D = ["--rdzv-backend", "c10d", "--rdzv-id", "job"]


def test_static_nodes(digest):
    port = find_free_port()
    place = ["--nnodes", 2, "--nproc-per-node", 1, "--master-addr", "127.0.0.1", "--master-port", port]
    ends = run_together([[*TORCHRUN, *place, "--node-rank", rank, SCRIPT] for rank in range(2)], [{}] * 2)
    assert [code for code, _ in ends] == [0, 0], ends
    assert [read_results(output) for _, output in ends] == [[(2, digest)]] * 2


def test_c10d_nodes(digest):
    place = ["--nnodes", 2, "--nproc-per-node", 1, "--rdzv-endpoint", f"127.0.0.1:{find_free_port()}"]
    ends = run_together([[*TORCHRUN, *C10D, *place, SCRIPT]] * 2, [{}] * 2)
    assert [code for code, _ in ends] == [0, 0], ends
    assert [read_results(output) for _, output in ends] == [[(2, digest)]] * 2


@pytest.mark.parametrize("rendezvous", [[], ["--standalone"]])
def test_restarts_continue_exactly(rendezvous, digest, tmp_path):
    """The static rendezvous keeps its store, with what the processes before had written."""
    script = [SCRIPT, "--checkpoint", tmp_path / "checkpoint", "--die", tmp_path / "died", "--pause", 0.1]
    code, output = run([*TORCHRUN, *rendezvous, "--nproc-per-node", 2, "--max-restarts", 1, *script])
    assert code == 0, output
    assert read_results(output) == [(2, digest)] * 2
    epochs = re.findall(r"epoch (\d) on 2", output)
    assert [epochs.count(epoch) for epoch in "023"] == [1, 2, 1]  # it went on, and not from the beginning


def test_a_process_that_ends_before_it_comes_stops_all(tmp_path):
    script = tmp_path / "early.py"
    script.write_text(f"import os\nif os.environ['RANK'] == '0':\n    exec(open({str(SCRIPT)!r}).read())\n")
    code, output = run([*TORCHRUN, "--nproc-per-node", 2, script], LOCKSTEP_WORKER_TIMEOUT=3)
    assert code != 0
    assert "Process 1 of 2 has not come to where the processes meet. Waited 3 seconds." in output


class Node:
    """One of torchrun's nodes on this host, in a process group of its own."""

    def __init__(self, port, folder, name):
        self.output = folder / name
        meeting = [*C10D, "--rdzv-endpoint", f"127.0.0.1:{port}", "--nnodes", "1:2", "--nproc-per-node", "1"]
        quick = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
        options = ["--max-restarts", "3", "--monitor-interval", "0.1", "--rdzv-conf", quick]
        script = [str(SCRIPT), "--checkpoint", str(folder / "checkpoint"), "--pause", "0.1", "--epochs", "60"]
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [*TORCHRUN, *meeting, *options, *script],
                env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stdout=file,
                stderr=file,
                process_group=0,
            )

    def wait_for(self, text):
        """Waits until it has printed the text since the last time."""
        deadline = time.monotonic() + SECONDS
        while text not in self.output.read_text():
            assert time.monotonic() < deadline, self.output.read_text()
            assert self.process.poll() is None, self.output.read_text()
            time.sleep(0.05)

    def kill(self):
        """Ends the node with all its processes, as when its host fails."""
        for child in find_children(self.process.pid):
            os.kill(child, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


def wait_for_listener(port):
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def find_children(parent):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in listed.stdout.split()]


def test_nodes_that_leave_and_come_back(tmp_path):
    """Two nodes, one, two again: the digest is that of a run that was never interrupted.

    By default torchrun gives a node the address of an old store if another node was first in between (torch 2.13).
    """
    code, output = run([sys.executable, SCRIPT, "--epochs", 60])
    assert code == 0, output
    ((_, whole),) = read_results(output)
    port = find_free_port()
    nodes = [Node(port, tmp_path, "first")]
    try:
        wait_for_listener(port)  # the node that serves the rendezvous has to stay
        nodes.append(Node(port, tmp_path, "second"))
        while not re.search("epoch [1-9] on 2", "".join(node.output.read_text() for node in nodes)):
            time.sleep(0.05)
        nodes.pop().kill()
        nodes[0].wait_for(" on 1\n")
        nodes.append(Node(port, tmp_path, "third"))
        ends = [node.process.wait(timeout=SECONDS) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    first, third = (node.output.read_text() for node in nodes)
    assert ends == [0, 0], first + third
    assert read_results(first) + read_results(third) == [(2, whole)] * 2
