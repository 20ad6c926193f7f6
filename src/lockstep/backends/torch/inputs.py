"""Inputs: a shard's arrays in fresh memory, and how a model is called with them.

Kernels choose their path by a pointer's alignment, and with it their bits. So a
shard's arrays are always copied into buffers of their own and never are views of
the batch.
"""

import threading
from typing import Any

import numpy as np
import torch

from lockstep.core.batches import transform

_THREAD = threading.local()  # its streams


def put(value: Any, device: torch.device) -> Any:
    """A nest with every array in a fresh, contiguous tensor on the device."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Staged):
            return value.taken()
        if isinstance(value, torch.Tensor):
            fresh = torch.empty(value.shape, dtype=value.dtype, device=device)
            return fresh.copy_(value.detach())
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
            return torch.tensor(value, device=device)
        if isinstance(value, list):
            return [put(entry, device) for entry in value]
        return value

    return transform(value, leaf)


class Staged:
    """A tensor that lies on its GPU already, in a buffer of its own, filled on another stream."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.shape = tensor.shape

    def __len__(self) -> int:
        return len(self._tensor)

    def __getitem__(self, where: Any) -> torch.Tensor:
        return self.taken()[where]

    def taken(self) -> torch.Tensor:
        """The tensor, whose memory is not used again before the computing stream is done with it."""
        self._tensor.record_stream(torch.cuda.current_stream(self._tensor.device))
        return self._tensor


def stage(piece: Any, device: torch.device) -> Any:
    """The piece with its arrays on the GPU: pinned, and copied on a stream of this thread's own."""
    if device.type != "cuda":
        return piece
    stream = _side_stream(device)

    def leaf(value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.ndim:
            value = torch.from_numpy(value if value.flags.c_contiguous else np.ascontiguousarray(value))
        if not isinstance(value, torch.Tensor) or not value.ndim or value.is_cuda:
            return value
        fresh = torch.empty(value.shape, dtype=value.dtype, device=device)
        return Staged(fresh.copy_(value.detach().contiguous().pin_memory(), non_blocking=True))

    with torch.cuda.device(device), torch.cuda.stream(stream):
        staged = transform(piece, leaf)
        stream.synchronize()  # this thread waits; the one that computes does not
    return staged


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    streams: dict[torch.device, torch.cuda.Stream] = _THREAD.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return streams[device]


def host(value: Any) -> Any:
    """A tensor as numpy, sharing its memory where it can; anything else as it is."""
    if isinstance(value, list):
        return [host(entry) for entry in value]
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return value if value.dtype == torch.bfloat16 else value.numpy()  # numpy has no bfloat16


def host_output(value: Any) -> Any:
    """An output as numpy, which has no bfloat16: those leave as float32."""
    return host(value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value)


def copied(nest: Any) -> Any:
    """A nest with every tensor as numpy in memory of its own: a model may write to its outputs once more."""
    return transform(nest, lambda value: np.array(host_output(value)) if isinstance(value, torch.Tensor) else value)


def to_cpu(metric: Any) -> Any:
    """A metric object with its own tensors on the CPU.

    In a launched world torchmetrics would gather by itself: what every process has already, and as often as one looks.
    """
    if not isinstance(metric, torch.nn.Module):
        return metric
    for each in metric.modules():
        if hasattr(each, "sync_on_compute"):
            vars(each).update(sync_on_compute=False, _to_sync=False)
    return metric.to("cpu")
