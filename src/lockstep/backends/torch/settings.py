"""Settings: the global switches of torch that can change bits.

They are set only while Lockstep computes, and put back afterwards. A worker takes
over the script's own values first.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from lockstep.errors import ModelError


def _flushes_denormals() -> bool:
    """Whether this process flushes denormal numbers to zero; torch can set that but not tell it."""
    return not bool(torch.tensor(2.3e-308, dtype=torch.float64).div(4).item())


def _guarded(get: Callable[[], Any]) -> Callable[[], Any]:
    """None where torch refuses to tell: a script has set the newer switches, which stand here on their own."""

    def value() -> Any:
        try:
            return get()
        except RuntimeError:
            return None

    return value


def _einsum() -> tuple[bool, str | None]:
    einsum: Any = torch.backends.opt_einsum
    return einsum.enabled, einsum.strategy


def _set_einsum(value: tuple[bool, str | None]) -> None:
    """A strategy can be set only where it is enabled."""
    einsum: Any = torch.backends.opt_einsum
    if einsum.is_available():
        einsum.enabled = True
        einsum.strategy = value[1]
        einsum.enabled = value[0]


Switch = tuple[Callable[[], Any], Callable[[Any], Any]]


def _own(name: str) -> dict[str, Switch]:
    """A switch of torch's core, where this version has it."""
    get, put = getattr(torch._C, f"_get_{name}", None), getattr(torch._C, f"_set_{name}", None)
    if get is None or put is None:
        return {}
    return {name: (get, lambda value: put(*value) if isinstance(value, tuple) else put(value))}


def _library(name: str) -> dict[str, Switch]:
    """A choice of library as a number, for its own type has no pickle."""
    found = _own(name)
    if not found:
        return {}
    get, put = found[name]
    return {name: (lambda: int(get()), lambda value: put(type(get())(value)))}


def _precision(backend: str, kind: str) -> dict[str, Switch]:
    """The precision of float32 in one library's operations, where this version has it."""
    if not hasattr(torch._C, "_get_fp32_precision_getter"):
        return {}
    get = torch._C._get_fp32_precision_getter
    put = torch._C._set_fp32_precision_setter
    return {f"{backend} {kind} precision": (lambda: get(backend, kind), lambda value: put(backend, kind, value))}


_SWITCHES: dict[str, Switch] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "float32 matmul precision": (_guarded(torch.get_float32_matmul_precision), torch.set_float32_matmul_precision),
    "mkldnn": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    "cudnn": (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    "cudnn tf32": (_guarded(torch._C._get_cudnn_allow_tf32), torch._C._set_cudnn_allow_tf32),
    "flash attention": (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    "memory-efficient attention": (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    "math attention": (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    "denormals": (_flushes_denormals, torch.set_flush_denormal),
    "cudnn attention": (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    "attention fast path": (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    "einsum": (_einsum, _set_einsum),
    **_own("cublas_allow_fp16_reduced_precision_reduction"),
    **_own("cublas_allow_bf16_reduced_precision_reduction"),
    **_own("cublas_allow_fp16_accumulation"),
    **_own("cpu_allow_fp16_reduced_precision_reduction"),
    **_own("math_sdp_allow_fp16_bf16_reduction"),
    **_library("blas_preferred_backend"),
    **_library("linalg_preferred_backend"),
    # After the older switches, which write to these; the general before the particular, which follows it.
    **_precision("generic", "all"),
    **{
        name: switch
        for backend in ("cuda", "mkldnn")
        for kind in ("all", "matmul", "conv", "rnn")
        for name, switch in _precision(backend, kind).items()
    },
}


FORCE_EAGER: Any = getattr(torch.compiler, "set_stance", None)  # torch 2.6 has it


def switches() -> dict[str, Any]:
    """The script's own values of every switch."""
    return {name: get() for name, (get, _) in _SWITCHES.items()}


def flip(values: dict[str, Any]) -> None:
    """Takes over the values of another process; only what differs is touched."""
    for name, (get, put) in _SWITCHES.items():
        if values[name] is not None and get() != values[name]:
            put(values[name])


def read_versions(device: torch.device) -> dict[str, str]:
    """Return what decides the bits on a device: torch, and on a GPU its model and the libraries that choose kernels.

    The model of a CPU is left out: see docs/limits.md.
    """
    versions = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        versions["device model"] = torch.cuda.get_device_name(device)
        versions["CUDA"] = str(torch.version.cuda or torch.version.hip)  # ROCm calls its devices cuda too
        versions["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    return versions


@contextmanager
def computing(threads: int, device: torch.device, exact: bool) -> Iterator[None]:
    """Inside, torch computes as the promise needs; afterwards every switch is where the script had it."""
    if torch.is_autocast_enabled(device.type):
        raise ModelError(
            "Lockstep chooses the precision of a shard itself. Got a call inside torch.autocast. Call it outside, and "
            'use lockstep.wrap(..., precision="bf16").'
        )
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
            if exact and FORCE_EAGER is not None:  # what torch.compile makes differs from process to process
                stack.enter_context(FORCE_EAGER("force_eager"))
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
