"""Refusals: what cannot be trained in parallel as it is, with the line to change."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ModelError, OptimizerError

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def check_model(model: Any) -> None:
    """Refuses models that another tool already spreads over devices, or compiles."""
    if isinstance(model, _WRAPPERS):
        raise ModelError(
            f"Lockstep does the distributing. Got a model in {type(model).__name__}. Wrap the plain model: "
            "lockstep.wrap(model.module, ...)."
        )
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise ModelError(
            "Lockstep runs each shard at its own shape and needs the plain model. Got one from torch.compile. "
            "Wrap the model itself: lockstep.wrap(model._orig_mod, ...)."
        )
    for name, module in model.named_modules():
        if any(map(nn.parameter.is_lazy, [*module._parameters.values(), *module._buffers.values()])):
            raise ModelError(
                f"A model has its parameters when it is wrapped. Got {type(module).__name__} at {name!r}, which takes "
                "its shape from the first batch. Call the model once on a batch before lockstep.wrap."
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise ModelError(
                f"Every shard has its own batch norm statistics. Got SyncBatchNorm at {name!r}. "
                "Use torch.nn.BatchNorm and choose `shards` for the statistics you want."
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ModelError(f"Gradients are dense. Got sparse=True at {name!r}. Use sparse=False.")


def check_optimizer(optimizer: Any, names: dict[int, str]) -> None:
    """Refuses optimizers that call the model themselves, or that hold what is not the model's."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"A PyTorch model goes with a torch.optim optimizer. Got {type(optimizer).__name__}. "
            "Use for example torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            "A step is one gradient and one update. LBFGS evaluates the model several times a step. "
            "Use another optimizer, such as torch.optim.Adam."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise OptimizerError("Gradients are dense. Got SparseAdam. Use torch.optim.Adam.")
    strangers = sum(id(parameter) not in names for group in optimizer.param_groups for parameter in group["params"])
    if strangers:
        raise OptimizerError(
            f"The optimizer holds the model's own parameters. Got {strangers} that the model does not have. "
            "Make the optimizer from this model: torch.optim.SGD(model.parameters(), lr=0.1)."
        )


def check_apart(tensors: Mapping[str, Tensor]) -> None:
    """Refuses tensors that share memory without being one object: in a pickle each has a memory of its own."""
    found = {id(tensor): (name, tensor) for name, tensor in tensors.items() if tensor.numel()}
    extents = [(tensor.device.index or 0, *_extent(tensor), name) for name, tensor in found.values()]
    end, last = (-1, 0), ""
    for device, start, stop, name in sorted(extents, key=lambda extent: extent[:2]):
        if (device, start) < end:
            raise ModelError(
                f"A worker gets every tensor by itself. {last!r} and {name!r} share memory and are two objects, which "
                "would be apart there. Make them one (b.weight = a.weight), make one a clone(), or use devices=1."
            )
        end, last = (device, stop), name


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses from the first element to behind the last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (steps + 1) * tensor.element_size()
