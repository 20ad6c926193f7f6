"""`wrap(compile=True)`: equal bits over devices and runs, what is refused, and what is printed.

Torch's cache on disk makes a graph that an earlier run has compiled cheap, so the tests share models and shapes.
"""

import sys
import sysconfig
from importlib import import_module
from types import ModuleType

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.backends.numpy import SGD, Dense
from lockstep.backends.torch import shard_compiler
from lockstep.backends.torch.shard_compiler import ShardCompiler
from lockstep.core.options import Options
from lockstep.errors import BatchError, ExactError, ModelError, PlanError, PlatformError

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's compiler

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(44, 6, generator=GENERATOR), torch.randint(0, 3, (44,), generator=GENERATOR)
FULL = X[:18], Y[:18]


class Net(nn.Module):
    """Batch norm, dropout and a branch that the script may change."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(6, 16),
            nn.BatchNorm1d(16),
            nn.Dropout(0.3),
            nn.Linear(16, 3),
        )

    def forward(self, x):
        return self.last(self.drop(F.relu(self.norm(self.first(x)))))


class Branching(nn.Linear):
    """A model that reads a value of its outputs, which breaks the graph."""

    def forward(self, x):
        found = super().forward(x)
        return found if found.sum().item() > 0 else 2 * found


@lockstep.objective
def objective(net, batch):
    outputs = net(batch[0])
    return lockstep.Sum(F.cross_entropy(outputs, batch[1], reduction="sum"), len(batch[1])), {"scale": outputs.mean()}


class WithLoss(nn.Module):
    """A model whose output has the loss."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


SCRIPT = """
import torch

class Net(torch.nn.Linear):
    def forward(self, x):
        return torch.relu(super().forward(x) * SCALE)
"""


def wrapped(net=None, loss=None, devices=1, compile=True, **options):
    torch.manual_seed(0)
    net = Net() if net is None else net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    loss = nn.CrossEntropyLoss() if loss is None else loss
    given = {"shards": 4, "threads": 1, "seed": 0, **options}
    return lockstep.wrap(net, optimizer, loss, devices=devices, compile=compile, **given)


def train(**arguments):
    """Returns the digest after two epochs, whose last batch is shorter, and the number of devices."""
    with wrapped(**arguments) as trainer:
        history = trainer.fit((X, Y), epochs=2, batch_size=18, verbose=0)
        return trainer.digest(), len(trainer.devices), history["loss"]


def test_bits_are_equal_on_any_number_of_devices_and_in_every_run():
    found = [train(devices=devices) for devices in (1, 2, 3, 1)]
    assert [num_devices for _, num_devices, _ in found] == [1, 2, 3, 1]
    assert len({(digest, tuple(loss)) for digest, _, loss in found}) == 1
    assert found[0][0] != train(compile=False)[0]


def test_what_the_process_compiled_before_changes_no_bits():
    with wrapped() as trainer:
        trainer.step(FULL)
        expected = trainer.digest()
    with wrapped() as trainer:
        for size in (17, 30, 44):  # without static shapes the next size would be compiled for any size
            trainer.step((X[:size], Y[:size]))
    with wrapped() as trainer:
        trainer.step(FULL)
        assert trainer.digest() == expected


@pytest.mark.parametrize("options", [{"loss": objective}, {"precision": "bf16"}, {"threads": 2, "shards": 2}])
def test_other_losses_precisions_and_threads(options):
    found = []
    for devices in (1, 2):
        with wrapped(devices=devices, **options) as trainer:
            trainer.step(FULL)
            found.append(trainer.digest())
            assert trainer.session.backend.compiler.num_graphs
    assert found[0] == found[1]


def test_a_model_with_a_loss_of_its_own():
    found = []
    for devices in (1, 2):
        torch.manual_seed(0)
        net = WithLoss()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with lockstep.wrap(net, optimizer, devices=devices, shards=4, threads=1, compile=True) as trainer:
            trainer.step({"x": FULL[0], "labels": FULL[1]})
            found.append(trainer.digest())
    assert found[0] == found[1]


def test_a_model_that_workers_get_by_value(monkeypatch):
    """As one of a script, whose globals a worker's `__main__` does not have."""
    script = ModuleType("script")
    script.SCALE = 0.5
    exec(SCRIPT, vars(script))
    monkeypatch.setitem(sys.modules, "script", script)
    cloudpickle.register_pickle_by_value(script)
    try:
        found = []
        for devices in (1, 2):
            with wrapped(lambda: script.Net(6, 3), devices=devices) as trainer:
                trainer.step(FULL)
                found.append(trainer.digest())
        assert found[0] == found[1]
    finally:
        cloudpickle.unregister_pickle_by_value(script)


def test_evaluations_run_uncompiled():
    with wrapped() as trainer:
        trainer.step(FULL)
        num_graphs = trainer.session.backend.compiler.num_graphs
        trainer.evaluate((X, Y))
        outputs = trainer.predict(X)
        assert trainer.session.backend.compiler.num_graphs == num_graphs
        state = trainer.model.state_dict()
    with wrapped(compile=False) as plain:
        plain.model.load_state_dict(state)
        assert plain.predict(X).tobytes() == outputs.tobytes()


def test_what_the_script_changes_between_steps_counts():
    """A hook, a frozen layer, a number of a module and the mode of a layer, on one and two devices."""

    def halve(module, inputs, output):
        return output / 2

    changes = [
        lambda net: net.last.register_forward_hook(halve),
        lambda net: net.first.requires_grad_(False),
        lambda net: setattr(net.drop, "p", 0.0),
        lambda net: net.norm.eval(),
    ]
    found = []
    for devices in (1, 2):
        with wrapped(devices=devices) as trainer:
            found.append([])
            trainer.step(FULL)
            for change in changes[devices - 1 :]:  # workers lack hooks that are registered later
                change(trainer.model)
                before = trainer.session.backend.compiler.num_graphs
                trainer.step(FULL)
                assert trainer.session.backend.compiler.num_graphs > before
                found[-1].append(trainer.digest())
    with wrapped() as trainer:
        trainer.step(FULL)
        for change, digest in zip(changes[1:], found[1], strict=True):
            change(trainer.model)
            trainer.step(FULL)
            assert trainer.digest() == digest


def test_the_opening_line_says_how_long_compiling_took(capsys):
    with wrapped() as trainer:
        trainer.fit((X, Y), epochs=1, batch_size=18)
        line = capsys.readouterr().out.splitlines()[0]
        assert line.startswith(
            "1 device (cpu:0), 4 shards of 4 or 5, batch 18, 1 thread per shard, seed 0, compiled in "
        )
        assert float(line.split()[-2]) > 0
        trainer.fit((X, Y), epochs=1, batch_size=18)  # for which nothing is compiled
        assert capsys.readouterr().out.splitlines()[0].endswith("seed 0")


def test_a_resumed_run_must_compile_as_the_saved_one_did(tmp_path):
    with wrapped() as trainer:
        trainer.step(FULL)
        trainer.save(tmp_path / "compiled")
        trainer.step(FULL)
        expected = trainer.digest()
    with wrapped(devices=2) as trainer:
        trainer.restore(tmp_path / "compiled")
        trainer.step(FULL)
        assert trainer.digest() == expected
    with wrapped(compile=False) as trainer:
        with pytest.raises(ExactError) as caught:
            trainer.restore(tmp_path / "compiled")
        trainer.save(tmp_path / "plain")
    said = (
        "The checkpoint was saved with compile=True, and this run has compile=False, so it would not give the same bits"
    )
    assert str(caught.value).startswith(said)
    with (
        wrapped() as trainer,
        pytest.raises(ExactError, match="saved with compile=False, and this run has compile=True"),
    ):
        trainer.restore(tmp_path / "plain")
    with wrapped(exact=False) as trainer:
        trainer.restore(tmp_path / "plain")


def test_a_checkpoint_from_before_the_option_is_one_of_a_run_without_it():
    with wrapped(compile=False) as trainer:
        saved = trainer.session.snapshot()
        del saved.facts["options"]["compile"]
        trainer.session.restore(saved)
    with wrapped() as trainer, pytest.raises(ExactError, match="saved with compile=False"):
        trainer.session.restore(saved)


def test_another_cpp_compiler_is_refused_at_resume():
    with wrapped() as trainer:
        saved = trainer.session.snapshot()
        saved.facts["versions"]["C++ compiler"] = "g++ 1.0"
        with pytest.raises(ExactError, match=r"saved with C\+\+ compiler g\+\+ 1\.0, and this run has C\+\+ compiler "):
            trainer.session.restore(saved)


# -- what is refused


def test_a_graph_break_is_refused_unless_not_exact():
    with wrapped(lambda: Branching(6, 3)) as trainer:
        before = trainer.digest()
        with pytest.raises(ModelError) as caught:
            trainer.step(FULL)
        assert trainer.digest() == before
    assert str(caught.value).startswith(
        "compile=True compiles the model's forward pass and the loss as one graph each, and torch.compile cannot "
        "compile this code. Change what it names below, leave compile out, or use exact=False, which allows several "
        "graphs.\nUserError: "
    )
    with wrapped(lambda: Branching(6, 3), exact=False) as trainer:
        trainer.step(FULL)


def test_code_that_fails_without_being_compiled_raises_its_own_error():
    with wrapped() as trainer:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
            trainer.step((X[:18, :4], Y[:18]))
        assert type(caught.value) is RuntimeError
        with pytest.raises(
            BatchError, match="too few examples for batch norm, which needs more than one value per channel"
        ):
            trainer.step((X[:6], Y[:6]))


def test_labels_out_of_range_are_refused_before_compiled_code_reads_them():
    with wrapped() as trainer, pytest.raises(BatchError, match=r"Labels must be from 0 to 2\. Got 8"):
        trainer.step((FULL[0], FULL[1] + 7))


def test_more_graphs_than_the_limit_are_refused(monkeypatch):
    monkeypatch.setattr(shard_compiler, "MAX_GRAPHS", 1)
    with wrapped(shards=2) as trainer:
        trainer.step(FULL)
        with pytest.raises(ModelError) as caught:
            trainer.step((X[:17], Y[:17]))
    assert str(caught.value) == (
        "compile=True compiles the model and the loss once for each shape of a shard and for each value of a number "
        "that their code reads, up to 1 times. This run needs more. Pad the batches to a few shapes, and put a number "
        "that changes into a tensor; or leave compile out."
    )


def test_changed_settings_of_the_compiler_are_refused():
    config = import_module("torch._inductor.config")
    said = (
        r"compiles with torch's own settings.* Got torch\._inductor\.config\.epilogue_fusion = False\. Leave that out"
    )
    with config.patch(epilogue_fusion=False), pytest.raises(ExactError, match=said):
        wrapped()
    with wrapped() as trainer, config.patch(epilogue_fusion=False), pytest.raises(ExactError, match=said):
        trainer.step(FULL)
    with config.patch(epilogue_fusion=False):
        wrapped(exact=False)


def test_a_compiler_that_is_turned_off_is_refused():
    with (
        import_module("torch._dynamo.config").patch(disable=True),
        pytest.raises(ModelError, match=r"needs torch\.compile, which is turned off by the environment variable"),
    ):
        wrapped()


def test_a_host_without_a_cpp_compiler_is_refused(monkeypatch):
    config = import_module("torch._inductor.config")
    said = r"needs a C\+\+ compiler.* and found none on this host\. Install one \(apt-get install g\+\+\), set "
    with config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(PlatformError, match=said):
        wrapped(exact=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/no/such/folder")
    with pytest.raises(
        PlatformError, match=r"needs the header files of Python, and there is no /no/such/folder/Python\.h"
    ):
        wrapped()


def test_float16_and_gpus_are_refused():
    with pytest.raises(ModelError, match="compile=True does not support precision='fp16'"):
        wrapped(precision="fp16")
    with pytest.raises(ExactError, match=r"exact on CPUs only.* Got cuda:0\. Leave compile out, or use exact=False"):
        ShardCompiler(Options(compile=True), torch.device("cuda:0"))


def test_other_frameworks_refuse():
    with pytest.raises(ModelError) as caught:
        lockstep.wrap(Dense([4, 3], seed=0), SGD(0.1), "mse", compile=True)
    assert str(caught.value) == (
        "compile=True is for models of torch.nn. Got a model of class Dense. JAX and TensorFlow compile every step "
        "without it, an MXNet block does after net.hybridize(), and a Keras model on PyTorch is not compiled. Leave "
        "compile out."
    )


def test_a_value_that_is_no_flag_is_refused():
    with pytest.raises(PlanError, match="compile"):
        wrapped(compile="inductor")
