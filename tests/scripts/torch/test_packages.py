"""Adapters, optimizers, metrics, data sets and modules of other packages."""

import lightning
import numpy as np
import peft
import pytest
import pytorch_optimizer
import schedulefree
import torch
import torchmetrics
import transformers
from torch import nn
from torch.nn.functional import cross_entropy

import datasets
import lockstep
from lockstep.errors import BatchError, OptimizerError
from scripts.compare import SHARDS, check_port
from scripts.torch.loops import draw, draw_tokens, read

X, Y = draw(24, 5), torch.arange(24) % 3


def create_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def test_lora():
    """`wrap`, and `step` for three lines of the loop."""
    batch = {"input_ids": draw_tokens(12, 9), "labels": draw_tokens(12, 9)}

    def start():
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=64,
            n_embd=32,
            n_layer=2,
            n_head=2,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        adapters = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapters)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def plain():
        model, optimizer = start()
        for _ in range(3):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return read(model)

    def port(devices, shards):
        model, optimizer = start()
        with lockstep.wrap(model, optimizer, devices=devices, shards=shards) as trainer:
            for _ in range(3):
                trainer.step(batch, verbose=0)
        return read(model)

    check_port(plain, port)


class FlatSOAP(pytorch_optimizer.SOAP):
    """SOAP with state that can be saved: between two steps the tensors of its lists have keys of their own."""

    def step(self, closure=None):
        for own in self.state.values():
            for name in [key.removesuffix("_length") for key in own if key.endswith("_length")]:
                own[name] = [own.pop(f"{name}{index}", []) for index in range(own.pop(f"{name}_length"))]
        loss = super().step(closure)
        for own in self.state.values():
            for name in [key for key, value in own.items() if isinstance(value, list)]:
                values = own.pop(name)
                own[f"{name}_length"] = len(values)
                own |= {
                    f"{name}{index}": value for index, value in enumerate(values) if isinstance(value, torch.Tensor)
                }
        return loss


class LookaheadAdam(torch.optim.Adam):
    """Lookahead by inheritance: every third step goes half of the way from the slow parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                own = self.state[parameter]
                slow = own["slow"] if "slow" in own else own.setdefault("slow", parameter.clone())
                if int(own["step"]) % 3 == 0:
                    parameter.copy_(slow.lerp_(parameter, 0.5))


@pytest.mark.parametrize(
    ("create_optimizer", "message"),
    [
        (
            lambda parameters: pytorch_optimizer.SOAP(parameters),
            "has a value of type list, .* Use another optimizer, or a subclass whose",
        ),
        (
            lambda parameters: pytorch_optimizer.Lookahead(torch.optim.Adam(parameters)),
            "Lookahead has a second optimizer, 'optimizer', .* a subclass of Adam that does the rest in `step`",
        ),
    ],
    ids=["soap", "lookahead"],
)
def test_an_optimizer_that_is_refused(create_optimizer, message):
    def train():
        model = create_network()
        with lockstep.wrap(model, create_optimizer(model.parameters()), nn.CrossEntropyLoss(), devices=1) as trainer:
            trainer.step((X, Y), verbose=0)
            trainer.digest()

    with pytest.raises(OptimizerError, match=message):
        train()


@pytest.mark.parametrize(
    "create_optimizer",
    [
        lambda parameters: schedulefree.AdamWScheduleFree(parameters, lr=1e-2),
        lambda parameters: pytorch_optimizer.Adan(parameters, lr=1e-2),
        lambda parameters: pytorch_optimizer.AdEMAMix(parameters, lr=1e-2),
        lambda parameters: pytorch_optimizer.Ranger21(parameters, num_iterations=8, lr=1e-2),
        lambda parameters: FlatSOAP(parameters, lr=1e-2),
        lambda parameters: LookaheadAdam(parameters, lr=1e-2),
    ],
    ids=["schedulefree", "adan", "ademamix", "ranger21", "soap", "lookahead"],
)
def test_an_optimizer(create_optimizer):
    """`wrap`, and `step` for four lines of the loop. `optimizer.train()` and `eval()` stay where they were."""

    def start():
        model = create_network()
        optimizer = create_optimizer(model.parameters())
        if isinstance(optimizer, schedulefree.AdamWScheduleFree):
            optimizer.train()
        return model, optimizer

    def finish(model, optimizer):
        if isinstance(optimizer, schedulefree.AdamWScheduleFree):
            optimizer.eval()
        return read(model)

    def plain():
        model, optimizer = start()
        for _ in range(4):
            cross_entropy(model(X), Y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return finish(model, optimizer)

    def port(devices, shards):
        model, optimizer = start()
        with lockstep.wrap(model, optimizer, nn.CrossEntropyLoss(), devices=devices, shards=shards) as trainer:
            for _ in range(4):
                trainer.step((X, Y), verbose=0)
        return finish(model, optimizer)

    check_port(plain, port)


def test_torchmetrics():
    """The metrics are given to `wrap`; the loop's `update` and `compute` go."""
    scores = {
        "auroc": torchmetrics.AUROC("multiclass", num_classes=3),
        "f1": torchmetrics.F1Score("multiclass", num_classes=3),
    }

    def plain():
        model = create_network()
        with torch.no_grad():
            for metric in scores.values():
                metric.update(model(X), Y)
        found = {name: np.float64(metric.compute().item()) for name, metric in scores.items()}
        for metric in scores.values():
            metric.reset()
        return found

    def port(devices, shards):
        model = create_network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lockstep.wrap(
            model, optimizer, nn.CrossEntropyLoss(), metrics=scores, devices=devices, shards=shards
        ) as trainer:
            logs = trainer.evaluate((X, Y), batch_size=12)
        return {name: np.float64(logs[name]) for name in scores}

    expected = plain()
    assert all(port(["cpu"] * count, shards) == expected for count, shards in [(1, 1), (1, SHARDS), (3, SHARDS)])


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = create_network()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self.network(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def test_a_lightning_module():
    """`training_step` is the objective: two lines for `Trainer(...).fit(...)`.

    What Lightning's own Trainer would do around it, such as its callbacks and `self.log`, is left to the loop.
    """
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=12)

    def plain():
        module = Lit()
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, batches)
        return read(module)

    def port(devices, shards):
        module = Lit()
        objective = lockstep.objective(lambda module, batch: module.training_step(batch, 0))
        optimizer = module.configure_optimizers()
        with lockstep.wrap(module, optimizer, objective, devices=devices, shards=shards) as trainer:
            for _ in range(2):
                for batch in batches:
                    trainer.step(batch, verbose=0)
        return read(module)

    check_port(plain, port)


def create_bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config)


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_a_data_set(form):
    """`wrap`, and `fit(dataset)` for the loop and its DataLoader."""
    examples = datasets.Dataset.from_dict({"input_ids": draw_tokens(12, 9).tolist(), "labels": [0, 1] * 6})

    def plain():
        model = create_bert()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for batch in torch.utils.data.DataLoader(examples.with_format("torch"), batch_size=6):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return read(model)

    def port(devices, shards):
        model = create_bert()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with lockstep.wrap(model, optimizer, devices=devices, shards=shards) as trainer:
            trainer.fit(examples.with_format(form), batch_size=6, shuffle=False, verbose=0)
        return read(model)

    check_port(plain, port)


@pytest.mark.parametrize("form", [None, "torch"])
def test_a_data_set_with_examples_of_several_lengths(form):
    ragged = datasets.Dataset.from_dict({"input_ids": [[1] * (2 + i % 3) for i in range(12)], "labels": [0, 1] * 6})
    model = create_bert()
    with lockstep.wrap(model, torch.optim.AdamW(model.parameters()), devices=1) as trainer:
        with pytest.raises(BatchError, match=r"different structure or shape .* by cutting or padding arrays to one"):
            trainer.fit(ragged.with_format(form), batch_size=6, verbose=0)
        padded = ragged.map(lambda each: {"input_ids": each["input_ids"] + [0] * (4 - len(each["input_ids"]))})
        trainer.fit(padded.with_format(form), batch_size=6, verbose=0)
