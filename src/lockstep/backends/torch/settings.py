"""The global switches of torch that can change bits.

They are set only while Lockstep computes, and restored afterwards. A worker takes over the script's own values
first.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from lockstep.errors import ModelError


def _is_flushing_denormals() -> bool:
    """Returns whether this process flushes denormal numbers to zero, which torch can set but not read."""
    return not bool(torch.tensor(2.3e-308, dtype=torch.float64).div(4).item())


def _read_or_none(get: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that calls `get`, or returns None if torch raises because the script uses newer switches."""

    def value() -> Any:
        try:
            return get()
        except RuntimeError:
            return None

    return value


def _read_einsum() -> tuple[bool, str | None]:
    einsum: Any = torch.backends.opt_einsum
    return einsum.enabled, einsum.strategy


def _write_einsum(value: tuple[bool, str | None]) -> None:
    """Sets `enabled` and `strategy` of opt_einsum; the strategy can only be set while it is enabled."""
    einsum: Any = torch.backends.opt_einsum
    if einsum.is_available():
        einsum.enabled = True
        einsum.strategy = value[1]
        einsum.enabled = value[0]


Switch = tuple[Callable[[], Any], Callable[[Any], Any]]


def _find_core_switch(name: str) -> dict[str, Switch]:
    """Returns {name: (get, set)} for a switch of torch's core; empty if this version of torch does not have it."""
    get, put = getattr(torch._C, f"_get_{name}", None), getattr(torch._C, f"_set_{name}", None)
    if get is None or put is None:
        return {}
    return {name: (get, lambda value: put(*value) if isinstance(value, tuple) else put(value))}


def _find_library_switch(name: str) -> dict[str, Switch]:
    """Returns {name: (get, set)} for a choice of library, as an integer because its own type cannot be pickled."""
    found = _find_core_switch(name)
    if not found:
        return {}
    get, put = found[name]
    return {name: (lambda: int(get()), lambda value: put(type(get())(value)))}


def _find_precision_switch(backend: str, kind: str) -> dict[str, Switch]:
    """Returns {name: (get, set)} for float32's precision in a library's operations; empty if torch does not have it."""
    if not hasattr(torch._C, "_get_fp32_precision_getter"):
        return {}
    get = torch._C._get_fp32_precision_getter
    put = torch._C._set_fp32_precision_setter
    return {f"{backend} {kind} precision": (lambda: get(backend, kind), lambda value: put(backend, kind, value))}


_SWITCHES: dict[str, Switch] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "float32 matmul precision": (_read_or_none(torch.get_float32_matmul_precision), torch.set_float32_matmul_precision),
    "mkldnn": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    "cudnn": (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    "cudnn tf32": (_read_or_none(torch._C._get_cudnn_allow_tf32), torch._C._set_cudnn_allow_tf32),
    "flash attention": (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    "memory-efficient attention": (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    "math attention": (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    "denormals": (_is_flushing_denormals, torch.set_flush_denormal),
    "cudnn attention": (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    "attention fast path": (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    "einsum": (_read_einsum, _write_einsum),
    **_find_core_switch("cublas_allow_fp16_reduced_precision_reduction"),
    **_find_core_switch("cublas_allow_bf16_reduced_precision_reduction"),
    **_find_core_switch("cublas_allow_fp16_accumulation"),
    **_find_core_switch("cpu_allow_fp16_reduced_precision_reduction"),
    **_find_core_switch("math_sdp_allow_fp16_bf16_reduction"),
    **_find_library_switch("blas_preferred_backend"),
    **_find_library_switch("linalg_preferred_backend"),
    # After the older switches, which write to these; general ones first, because they overwrite the particular ones.
    **_find_precision_switch("generic", "all"),
    **{
        name: switch
        for backend in ("cuda", "mkldnn")
        for kind in ("all", "matmul", "conv", "rnn")
        for name, switch in _find_precision_switch(backend, kind).items()
    },
}


FORCE_EAGER: Any = getattr(torch.compiler, "set_stance", None)  # torch 2.6 has it


def read_switches() -> dict[str, Any]:
    """Returns the present value of every global switch, by name."""
    return {name: get() for name, (get, _) in _SWITCHES.items()}


def write_switches(values: dict[str, Any]) -> None:
    """Sets the switches to what `read_switches` returned in another process; only those that differ."""
    for name, (get, put) in _SWITCHES.items():
        if values[name] is not None and get() != values[name]:
            put(values[name])


def read_versions(device: torch.device) -> dict[str, str]:
    """Returns the versions that decide the bits: torch, and on a GPU the GPU's model, CUDA and cuDNN.

    The model of a CPU is left out: see docs/limits.md.
    """
    versions = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        versions["device model"] = torch.cuda.get_device_name(device)
        versions["CUDA"] = str(torch.version.cuda or torch.version.hip)  # ROCm calls its devices cuda too
        versions["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    return versions


class Preparation:
    """A context in which torch computes reproducibly: with the run's threads, and deterministic algorithms if exact.

    On exit every switch gets back the script's value.

    Every step enters such a context, so only switches that differ are set.
    """

    def __init__(self, threads: int, device: torch.device, exact: bool, autocasts: bool) -> None:
        self._threads = threads
        self._device = device
        self._exact = exact
        self._autocasts = autocasts  # whether shards compute in autocast, whose cache then lasts for all of them

    def __enter__(self) -> None:
        device = self._device
        if torch.is_autocast_enabled(device.type):
            raise ModelError(
                "Lockstep was called inside torch.autocast, but it sets the precision of each shard itself. Remove the "
                'torch.autocast context, and use lockstep.wrap(..., precision="bf16") instead.'
            )
        self._before = _read_modes()
        self._cudnn = torch.backends.cudnn.benchmark if device.type == "cuda" else None
        self._stance: Any = None
        self._stack = ExitStack()
        try:
            self._write()
        except BaseException:
            self.__exit__()
            raise

    def _write(self) -> None:
        device = self._device
        if device.type == "cpu" and self._threads != self._before[0]:
            torch.set_num_threads(self._threads)
        if self._exact:
            _write_deterministic(True, False, False)
            if device.type == "cuda":
                torch.backends.cudnn.benchmark = False
            if FORCE_EAGER is not None:  # what torch.compile generates differs from process to process
                self._stance = FORCE_EAGER("force_eager")  # takes effect without being entered
        if torch.is_inference_mode_enabled():
            self._stack.enter_context(torch.inference_mode(False))
        torch.set_grad_enabled(True)
        if self._autocasts:
            self._stack.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cuda":
            self._stack.enter_context(torch.cuda.device(device))

    def __exit__(self, *raised: object) -> None:
        self._stack.close()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
        threads, *deterministic, graded = self._before
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        _write_deterministic(*deterministic)
        torch.set_grad_enabled(graded)
        torch.set_autocast_enabled(self._device.type, False)  # as it was: a pass may have left it on
        if self._cudnn is not None:
            torch.backends.cudnn.benchmark = self._cudnn


def _read_modes() -> tuple[int, bool, bool, bool, bool]:
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.is_grad_enabled(),
    )


def _write_deterministic(enabled: bool, warn_only: bool, fill: bool) -> None:
    """Sets what `torch.use_deterministic_algorithms` sets, except for the compiler, which is not used inside."""
    torch._C._set_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def use_precision(precision: str | None, device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which the forward pass runs in mixed precision; without effect for `precision=None`."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision or "")
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
