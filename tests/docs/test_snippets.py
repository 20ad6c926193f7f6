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
        "README.md": 1,
        "docs/checkpoints.md": 2,
        "docs/collectives.md": 18,  # all but the first are doctests, see tests/collectives
        "docs/coming-from.md": 1,
        "docs/gradients.md": 1,
        "docs/input.md": 1,
        "docs/jax.md": 1,
        "docs/keras.md": 2,
        "docs/mxnet.md": 1,
        "docs/new-backend.md": 4,  # see tests/docs/test_new_backend.py
        "docs/own-loop.md": 3,
        "docs/report.md": 1,
        "docs/several-optimizers.md": 1,
        "docs/verify.md": 1,
    }


@pytest.mark.parametrize(
    ("page", "index", "example"),
    [
        ("README.md", 0, "train.py"),
        ("docs/jax.md", 0, "train_jax.py"),
        ("docs/keras.md", 0, "train_keras.py"),
        ("docs/keras.md", 1, "keras_files.py"),
        ("docs/mxnet.md", 0, "train_mxnet.py"),
        ("docs/checkpoints.md", 1, "keras_guide.py"),
        ("docs/own-loop.md", 0, "own_loop.py"),
        ("docs/own-loop.md", 1, "objective.py"),
        ("docs/own-loop.md", 2, "word_language_model.py"),
    ],
)
def test_a_page_prints_lines_of_an_example(page, index, example):
    """Which tests/examples runs."""
    printed = snippets(page)[index]
    text = (ROOT / "examples" / example).read_text(encoding="utf-8")
    assert printed in text
    assert (printed == text) == (example == "train.py")  # that one is printed whole


def test_the_pages_make_trainer_is_verified(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "check.py").write_text(snippets("docs/verify.md")[0])
    arguments = ["verify", f"{tmp_path}/check.py:make_trainer", "--devices", "1,2", "--steps", "1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output + result.stderr


def test_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    train, test = ((x[:64], y[:64]) for x, y in digits())
    with digits_trainer() as trainer:
        exec(snippets("docs/report.md")[0], {"trainer": trainer, "train": train, "test": test})
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["first.html", "first.json"]


def test_gradients():
    (x, y), _ = digits()
    net = torch.nn.Sequential(torch.nn.Linear(64, 10))
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    with lockstep.wrap(net, sgd, torch.nn.CrossEntropyLoss(), shards=2) as trainer:
        before = net[0].weight.detach().clone()
        exec(snippets("docs/gradients.md")[0], {"trainer": trainer, "batch": (x[:64], y[:64] * 0)})
        assert float((net[0].weight.detach() - before).abs().max()) == pytest.approx(0.1)


def test_several_optimizers(capsys):
    parts = {name: torch.nn.Sequential(torch.nn.Linear(*shape)) for name, shape in (("g", (4, 8)), ("c", (8, 1)))}
    names = {"torch": torch, "nn": torch.nn, "lockstep": lockstep}
    names |= {"Generator": lambda: parts["g"], "Critic": lambda: parts["c"]}
    names["batches"] = [{"images": torch.randn(16, 8), "noise": torch.randn(16, 4)}]
    before = [parameter.clone() for part in parts.values() for parameter in part.parameters()]
    exec(snippets("docs/several-optimizers.md")[0], names)
    after = [parameter for part in parts.values() for parameter in part.parameters()]
    assert all((old != new).any() for old, new in zip(before, after, strict=True))


class LitClassifier(torch.nn.Module):
    """The methods of a LightningModule; tests/scripts has a real one."""

    def __init__(self):
        super().__init__()
        self.network = torch.nn.Linear(64, 10)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.network(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def test_coming_from_lightning():
    x, y = (torch.as_tensor(part[:256]) for part in digits()[0])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64)
    names = {"lockstep": lockstep, "LitClassifier": LitClassifier, "loader": loader}
    exec(snippets("docs/coming-from.md")[0], names)
    first, last = names["history"].history["loss"]
    assert last < first


def test_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train, test = ((x[:64], y[:64]) for x, y in digits())
    text, _ = snippets("docs/checkpoints.md")
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
        "update": lambda replica, total: replica.detach().sub_(total),
    }
    exec(snippets("docs/collectives.md")[0], names)
    assert [replica.tolist() for replica in names["replicas"]] == [[-8.0] * 3] * 2
