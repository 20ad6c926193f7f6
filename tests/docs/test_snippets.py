"""The Python code that README and docs print runs as printed; docs/collectives.md has a test of its own."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import lockstep
from lockstep.cli.app import app
from lockstep.datasets import digits

ROOT = Path(__file__).parents[2]


def snippets(page):
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


def digits_trainer():
    net = torch.nn.Linear(64, 10)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    return lockstep.wrap(net, sgd, torch.nn.CrossEntropyLoss(), metrics=["accuracy"])


def test_every_snippet_of_every_page_has_a_test():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = {str(page.relative_to(ROOT)): len(snippets(page.relative_to(ROOT))) for page in pages}
    assert {page: count for page, count in found.items() if count} == {
        "README.md": 4,
        "docs/checkpoints.md": 1,
        "docs/input.md": 1,
        "docs/collectives.md": 13,  # the twelve others are doctests, see tests/collectives
    }


@pytest.mark.parametrize(("index", "example"), [(0, "train.py"), (1, "train_jax.py"), (2, "keras_guide.py")])
def test_readme_prints_lines_of_its_examples(index, example):
    """Which tests/examples runs."""
    printed = snippets("README.md")[index]
    text = (ROOT / "examples" / example).read_text(encoding="utf-8")
    assert all(line in text.splitlines() for line in printed.splitlines())
    assert (printed == text) == (example == "train.py")  # that one is printed whole


def test_readmes_make_trainer_is_verified(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "check.py").write_text(snippets("README.md")[3])
    arguments = ["verify", f"{tmp_path}/check.py:make_trainer", "--devices", "1,2", "--steps", "1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output + result.stderr


def test_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train, test = ((x[:64], y[:64]) for x, y in digits())
    (text,) = snippets("docs/checkpoints.md")
    exec(text, {"lockstep": lockstep, "trainer": digits_trainer(), "train": train, "test": test})
    assert (tmp_path / "ckpt-often" / "best").is_symlink()


def augment(x, y):
    return x + np.random.normal(size=x.shape).astype(x.dtype), y


def test_input():
    x, y = (part[:256] for part in digits()[0])
    (text,) = snippets("docs/input.md")
    trainer = digits_trainer()
    exec(text, {"lockstep": lockstep, "trainer": trainer, "x": x, "y": y, "augment": augment})
    assert trainer.num_steps == 10


def test_the_loop_of_collectives():
    names = {
        "lockstep": lockstep,
        "params": torch.zeros(3),
        "devices": ["cpu", "cpu"],
        "batches": [torch.ones(4, 3), torch.ones(4, 3)],
        "gradient": lambda replica, piece: piece.sum(0),
        "update": lambda replica, total: replica.sub_(total),
    }
    exec(snippets("docs/collectives.md")[0], names)
    assert [replica.tolist() for replica in names["replicas"]] == [[-8.0] * 3] * 2
