"""The commands verify and demo with TensorFlow."""

from typer.testing import CliRunner

from lockstep.cli import demo, scripts
from lockstep.cli.app import app


def test_verify_compares_digests():
    options = "--framework tensorflow --devices 1,3 --steps 2 --shards 3 --batch-size 50"
    result = CliRunner().invoke(app, ["verify", *options.split()])
    assert result.exit_code == 0, result.output + result.stderr
    assert "The same bits after each of 2 steps on 1 and 3 devices." in result.output


def test_the_demo_runs_the_framework_s_own_loop():
    peer = scripts.load_scripts("tensorflow").peer
    outcome = demo.run_script(peer.title, peer.file, demo._with_epochs(peer.text, 1), 2, ["2"])
    assert len(outcome.digest) == 64
    assert 0.1 < outcome.accuracy <= 1.0
