"""The command line with JAX: `verify`, and the script that `demo` compares with."""

from typer.testing import CliRunner

from lockstep.cli import demo, scripts
from lockstep.cli.app import app


def test_lockstep_verify_runs_with_jax():
    arguments = ["verify", "--framework", "jax", "--devices", "1,3", "--steps", "2"]
    arguments += ["--shards", "3", "--batch-size", "51"]  # one size of shard
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output + result.stderr
    assert "The same bits after each of 2 steps on 1 and 3 devices." in result.output


def test_the_demo_runs_with_jax():
    peer = scripts.load_scripts("jax").peer
    outcome = demo.run_script(peer.title, peer.file, demo._with_epochs(peer.text, 1), 2, ["2"])
    assert len(outcome.digest) == 64
    assert 0.1 < outcome.accuracy <= 1.0
