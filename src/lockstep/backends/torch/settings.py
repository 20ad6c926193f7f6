"""Settings: the global switches of torch that can change bits.

They are set only while Lockstep computes, and put back afterwards. A worker takes
over the script's own values first.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch


def _flushes_denormals() -> bool:
    """Whether this process flushes denormal numbers to zero; torch can set that but not tell it."""
    return not bool(torch.tensor(2.3e-308, dtype=torch.float64).div(4).item())


_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "mkldnn": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    "cudnn": (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    "cudnn tf32": (torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32),
    "flash attention": (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    "memory-efficient attention": (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    "math attention": (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    "denormals": (_flushes_denormals, torch.set_flush_denormal),
    "cudnn attention": (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
}


def switches() -> dict[str, Any]:
    """The script's own values of every switch."""
    return {name: get() for name, (get, _) in _SWITCHES.items()}


def flip(values: dict[str, Any]) -> None:
    """Takes over the values of another process; only what differs is touched."""
    for name, (get, put) in _SWITCHES.items():
        if get() != values[name]:
            put(values[name])


@contextmanager
def computing(threads: int, device: torch.device, exact: bool) -> Iterator[None]:
    """Inside, torch computes as the promise needs; afterwards every switch is where the script had it."""
    before = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark,
    )
    try:
        if device.type == "cpu":
            torch.set_num_threads(threads)
        if exact:
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            torch.backends.cudnn.benchmark = False
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autocast(device.type, enabled=False))
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1], warn_only=before[2])
        torch.utils.deterministic.fill_uninitialized_memory = before[3]  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = before[4]


def precise(precision: str | None, device: torch.device) -> AbstractContextManager[object]:
    """Inside, a forward pass runs in mixed precision, where that was asked for."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision or "")
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
