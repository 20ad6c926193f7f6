"""Copies a shard's arrays to new memory on the device, and outputs back to the host.

Kernels choose their algorithm by a pointer's alignment, and the algorithm decides the bits. So a shard's arrays are
always copied into buffers of their own and are never views of the batch.
"""

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor, contiguous_format

from lockstep.core.batches import leaves, transform

_THREAD = threading.local()  # its streams


def copy_to_device(value: Any, device: torch.device) -> Any:
    """Returns a pytree with every array copied into a fresh, contiguous tensor on the device."""
    kind = type(value)
    if kind is tuple:
        return tuple([copy_to_device(each, device) for each in value])
    if kind is Tensor and value.is_cpu and device.type == "cpu" and not value.requires_grad:
        return value.clone(memory_format=contiguous_format)

    def leaf(value: Any) -> Any:
        if isinstance(value, StagedTensor):
            return value.take()
        if isinstance(value, torch.Tensor):
            if value.device.type == device.type == "cpu":
                return value.detach().clone(memory_format=torch.contiguous_format)
            fresh = torch.empty(value.shape, dtype=value.dtype, device=device)
            return fresh.copy_(value.detach())
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
            return torch.tensor(value, device=device)
        if isinstance(value, list):
            return [copy_to_device(entry, device) for entry in value]
        return value

    return transform(value, leaf)


class StagedTensor:
    """A tensor that was copied to its GPU ahead of time, into a buffer of its own, on another stream."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.shape = tensor.shape

    def __len__(self) -> int:
        return len(self._tensor)

    def __getitem__(self, where: Any) -> torch.Tensor:
        return self.take()[where]

    def take(self) -> torch.Tensor:
        """Returns the tensor for the current stream, and keeps its memory until this stream has used it."""
        self._tensor.record_stream(torch.cuda.current_stream(self._tensor.device))
        return self._tensor


def stage(piece: Any, device: torch.device) -> Any:
    """Returns the shard's examples with arrays as StagedTensors: pinned, and copied on this thread's own stream."""
    if device.type != "cuda":
        return piece
    stream = _get_stream(device)

    def leaf(value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.ndim:
            value = torch.from_numpy(value if value.flags.c_contiguous else np.ascontiguousarray(value))
        if not isinstance(value, torch.Tensor) or not value.ndim or value.is_cuda:
            return value
        fresh = torch.empty(value.shape, dtype=value.dtype, device=device)
        return StagedTensor(fresh.copy_(value.detach().contiguous().pin_memory(), non_blocking=True))

    with torch.cuda.device(device), torch.cuda.stream(stream):
        staged = transform(piece, leaf)
        stream.synchronize()  # this thread waits; the one that computes does not
    return staged


def _get_stream(device: torch.device) -> torch.cuda.Stream:
    streams: dict[torch.device, torch.cuda.Stream] = _THREAD.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return streams[device]


def to_host(value: Any) -> Any:
    """Returns a tensor as numpy, sharing its memory if possible; anything else as it is."""
    if isinstance(value, list):
        return [to_host(entry) for entry in value]
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return value if value.dtype == torch.bfloat16 else value.numpy()  # numpy has no bfloat16


def output_to_host(value: Any) -> Any:
    """Returns an output as numpy; bfloat16, which numpy lacks, becomes float32."""
    return to_host(value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value)


def copy_to_host(tree: Any) -> Any:
    """Returns a pytree with every tensor copied to numpy, because the model may write to its outputs again."""
    return transform(tree, lambda value: np.array(output_to_host(value)) if isinstance(value, torch.Tensor) else value)


def view_as_tensors(tree: Any) -> list[torch.Tensor]:
    """Returns the numpy arrays of a pytree as tensors that share their memory; an empty list for None."""
    return [] if tree is None else [torch.from_numpy(each) for each in leaves(tree)]


def find_tensors(outputs: Any) -> list[torch.Tensor]:
    """Returns the tensors of a pytree."""
    found: list[torch.Tensor] = []
    transform(outputs, lambda value: found.append(value) if isinstance(value, torch.Tensor) else None)
    return found


def move_metric_to_cpu(metric: Any) -> Any:
    """Moves a metric object's own tensors to the CPU, and returns it.

    In a launched world torchmetrics would gather on every call what each process already has; this is turned off.
    """
    if not isinstance(metric, torch.nn.Module):
        return metric
    for each in metric.modules():
        if hasattr(each, "sync_on_compute"):
            vars(each).update(sync_on_compute=False, _to_sync=False)
    return metric.to("cpu")
