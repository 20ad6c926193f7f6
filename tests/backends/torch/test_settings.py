"""The switches of torch that can change bits reach every process, and a precision of the script's own is refused."""

import zlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.backends.torch import settings
from lockstep.errors import ExactError, ModelError

X = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 3


@pytest.fixture(autouse=True)
def as_it_was():
    before = settings.read_switches()
    yield
    settings.write_switches(before)
    assert settings.read_switches() == before


def set_matmul_precision(value):
    torch.backends.mkldnn.matmul.fp32_precision = value


def set_precision(value):
    torch.backends.fp32_precision = value


def set_einsum(value):
    torch.backends.opt_einsum.enabled = value


def set_strategy(value):
    torch.backends.opt_einsum.strategy = value


def set_accumulation(value):
    torch.backends.cuda.matmul.allow_fp16_accumulation = value


def set_reduction(value):
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = value


TURNS = {
    "fast path": (torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled, False),
    "strategy": (set_strategy, lambda: torch.backends.opt_einsum.strategy, "greedy"),
    "einsum": (set_einsum, lambda: torch.backends.opt_einsum.enabled, False),
    "matmul": (set_matmul_precision, lambda: torch.backends.mkldnn.matmul.fp32_precision, "bf16"),
    "precision": (set_precision, lambda: torch.backends.mkldnn.conv.fp32_precision, "tf32"),
    "legacy": (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, "medium"),
    "accumulation": (set_accumulation, lambda: torch.backends.cuda.matmul.allow_fp16_accumulation, True),
    "reduction": (
        set_reduction,
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        False,
    ),
}


@pytest.mark.parametrize("name", TURNS)
def test_a_switch_is_read_written_and_restored(name):
    turn, get, value = TURNS[name]
    before, first = settings.read_switches(), get()
    turn(value)
    turned = settings.read_switches()
    assert turned != before
    settings.write_switches(before)
    assert get() == first != value
    settings.write_switches(turned)
    assert get() == value
    assert settings.read_switches() == turned


def checksum():
    return float(zlib.crc32(repr(settings.read_switches()).encode()) % 2**20)  # exact in float32


@lockstep.objective
def telling(net, batch):
    """What the process that computes the shard has; the mean over two shards is one's own where both have it."""
    return F.cross_entropy(net(batch[0]), batch[1]), {"switches": checksum()}


def test_switches_that_the_script_changes_reach_the_workers():
    net = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    with lockstep.wrap(net, optimizer, telling, devices=2, shards=2, threads=1) as trainer:
        assert len(trainer.devices) == 2
        for turn, _, value in [(lambda value: None, None, None), *TURNS.values()]:
            turn(value)
            found.append(checksum())
            assert trainer.step((X, Y))["switches"] == found[-1]
    assert len(set(found)) == len(found)


def test_a_call_inside_autocast_is_refused():
    net = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with lockstep.wrap(net, optimizer, nn.CrossEntropyLoss(), devices=1, shards=2, threads=1) as trainer:
        before = trainer.digest()
        for use in (lambda: trainer.step((X, Y)), lambda: trainer.evaluate((X, Y)), lambda: trainer.predict(X)):
            with torch.autocast("cpu", torch.bfloat16), pytest.raises(ModelError) as caught:
                use()
            assert str(caught.value) == (
                "Lockstep was called inside torch.autocast, but it sets the precision of each shard itself. Remove the "
                'torch.autocast context, and use lockstep.wrap(..., precision="bf16") instead.'
            )
        assert trainer.digest() == before
        trainer.step((X, Y))


def test_the_versions_of_a_cpu_are_that_of_torch():
    assert settings.read_versions(torch.device("cpu")) == {"torch": torch.__version__}


def test_the_versions_of_a_gpu_name_its_model_and_libraries(monkeypatch):
    """Without a GPU: the names that torch would give are put in their places."""
    monkeypatch.setattr(torch.cuda, "get_device_name", {torch.device("cuda:1"): "NVIDIA H200"}.__getitem__)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert settings.read_versions(torch.device("cuda:1")) == {
        "torch": torch.__version__,
        "device model": "NVIDIA H200",
        "CUDA": "12.8",
        "cuDNN": "91002",
    }
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert settings.read_versions(torch.device("cuda:1"))["CUDA"] == "6.2"


def test_a_run_resumes_only_on_the_device_model_that_it_was_saved_on(monkeypatch, tmp_path):
    def made(model, **options):
        versions = {"torch": str(torch.__version__), "device model": model, "CUDA": "12.8", "cuDNN": "91002"}
        monkeypatch.setattr(settings, "read_versions", lambda device: versions)
        net = nn.Linear(5, 3)
        return lockstep.wrap(net, torch.optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss(), devices=1, **options)

    made("NVIDIA H200").save(tmp_path)
    made("NVIDIA H200").restore(tmp_path)
    with pytest.raises(ExactError, match="with device model NVIDIA H200, and this run has device model NVIDIA A100,"):
        made("NVIDIA A100").restore(tmp_path)
    made("NVIDIA A100", exact=False).restore(tmp_path)
