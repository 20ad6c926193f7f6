"""A PyTorch user needs no Lockstep to load the model."""

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

from lockstep.checkpoint import Snapshot, write  # noqa: E402
from lockstep.core.types import Array  # noqa: E402


def net(dtype):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_load_state_dict_reads_the_models_file(dtype, tmp_path):
    model = net(dtype)
    state = {}
    for name, tensor in model.state_dict().items():
        short = tensor.dtype == torch.bfloat16
        data = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if short else tensor.numpy()
        state[f"model.{name}"] = Array(data, str(tensor.dtype).removeprefix("torch."))
        state[f"optimizer.{name}.step"] = Array(np.asarray(1), "python")
    path = write(tmp_path / "mine", Snapshot(state))
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).to(dtype)
    found = load_file(path / "model.safetensors")
    other.load_state_dict(found)
    assert found.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(other.state_dict()[name], tensor)


def test_complex64_is_read(tmp_path):
    path = write(tmp_path / "mine", Snapshot({"model.w": Array(np.array([1 + 2j], "complex64"), "complex64")}))
    assert torch.equal(load_file(path / "model.safetensors")["w"], torch.tensor([1 + 2j]))
