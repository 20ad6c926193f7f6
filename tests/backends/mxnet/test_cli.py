"""The command line with this framework: what it verifies, and the peer that its demo compares with."""

from typer.testing import CliRunner

from lockstep.cli import demo, scripts
from lockstep.cli.app import app


def test_verify():
    arguments = [
        "verify",
        "--framework",
        "mxnet",
        "--devices",
        "1,3",
        "--steps",
        "2",
        "--shards",
        "3",
        "--batch-size",
        "50",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output + result.stderr
    assert "The same bits after each of 2 steps on 1 and 3 devices." in result.output


def test_the_peer_of_the_demo():
    peer = scripts.load_scripts("mxnet").peer
    outcome = demo.run_script(peer.title, peer.file, demo._with_epochs(peer.text, 1), 2, ["2"])
    assert len(outcome.digest) == 64
    assert 0.1 < outcome.accuracy <= 1.0
