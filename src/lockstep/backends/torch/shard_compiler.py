"""Compiles what a shard's training pass calls, with torch.compile: the model and the loss, or an objective.

Each process compiles for itself, because compiled code cannot be pickled. Equal bits need the same code in every
process, so that code must follow from the function, its arguments and the settings alone, and not from what the process
has compiled before: shapes are static, each function has a code object of its own, whose cache nothing else fills, a
pass is one graph or refused, and the compiler's settings are torch's own. See docs/design/compile.md.
"""

import importlib
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

from lockstep.core.batch_entries import call_model, check_outputs, spread_inputs
from lockstep.core.options import Options
from lockstep.errors import ExactError, ModelError, PlatformError

MAX_GRAPHS = 64  # of one function: each shape of a shard, and each value of a number that the code reads, needs one
_LONGEST_QUOTE = 500

_THREADS = "compile_threads"
# What torch chooses by measuring times differs from process to process.
_INDUCTOR = {
    "deterministic": True,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "fx_graph_remote_cache": False,
    _THREADS: 1,  # more are threads and processes that stay
    "cpp.dynamic_threads": False,
}
_DYNAMO = {
    "accumulated_recompile_limit": 1 << 30,
    "specialize_float": True,
    "suppress_errors": False,
}
_SET_BY_TORCH = {"automatic_dynamic_shapes", "assume_static_by_default", "recompile_limit", "skip_nnmodule_hook_guards"}

Call = Callable[[Any, Any], Any]
Function = TypeVar("Function", bound=Callable[..., Any])


class ShardCompiler:
    """Compiles functions for `wrap(compile=True)`; without that option returns them as they are.

    `seconds` is the time that compiling has taken in this process.
    """

    def __init__(self, options: Options, device: torch.device, modules: Iterable[nn.Module] = ()) -> None:
        self.seconds = 0.0
        self.num_graphs = 0
        self.generation = 0  # of compiled functions; a new one whenever the modules' hooks have changed
        self._modules = tuple(modules)  # whose hooks compiled code contains
        self._hooks: list[tuple[int, ...]] = []
        self.versions: Mapping[str, str] = {}  # of what decides the bits beside torch
        self.is_exact = options.exact
        self._is_on = options.compile
        if self._is_on:
            _check_options(options, device)
            if options.exact:
                check_settings()
            if device.type == "cpu":
                self.versions = {"C++ compiler": _find_cpp_compiler()}

    def compile(self, function: Function) -> Function | "CompiledFunction":
        """Returns the function in a compiled form, which is compiled at its first call."""
        return CompiledFunction(function, self) if self._is_on else function

    def compile_call(self) -> Call:
        """Returns `call_model`, or a form of it that runs the model compiled."""
        if not self._is_on:
            return call_model
        run = CompiledFunction(_run_model, self)

        def call(model: Any, inputs: Any) -> Any:
            return check_outputs(model, run(model, *spread_inputs(inputs)))

        return call

    def computing(self) -> AbstractContextManager[Any]:
        """Returns a context with the settings under which torch traces a function; raises if the script changed any."""
        if not self._is_on:
            return nullcontext()
        if self.is_exact:
            check_settings()
        hooks, self._hooks = self._hooks, list(filter(None, map(_read_hooks, self._modules)))
        self.generation += hooks != self._hooks
        config: Any = importlib.import_module("torch._dynamo.config")
        # Torch would check for hooks at each call, which takes longer than all else that it checks.
        chosen = {**_DYNAMO, "recompile_limit": MAX_GRAPHS, "skip_nnmodule_hook_guards": not self._hooks}
        patch: AbstractContextManager[Any] = config.patch(chosen)
        return patch

    def compile_graph(self, graph: Any, inputs: Any) -> Any:
        """Compiles one graph; torch calls this while it compiles a function."""
        self.num_graphs += 1
        compile_fx: Any = importlib.import_module("torch._inductor.compile_fx").compile_fx
        # The threads are named, because they are part of the code, and so are part of the key of torch's cache on disk.
        exact = {**_INDUCTOR, "cpp.threads": torch.get_num_threads()}
        return compile_fx(graph, inputs, config_patches=exact if self.is_exact else {_THREADS: 1})


class CompiledFunction:
    """A function that is compiled when it is called with gradients enabled; an evaluation runs it as it is."""

    def __init__(self, function: Callable[..., Any], compiler: ShardCompiler) -> None:
        self._function = function
        self._compiler = compiler
        exc: Any = importlib.import_module("torch._dynamo.exc")
        self._refusals = exc.TorchDynamoException, exc.FailOnRecompileLimitHit
        self._generation = -1

    def _compile(self) -> None:
        function, compiler = self._function, self._compiler

        def call(*arguments: Any) -> Any:
            return function(*arguments)

        # A code object of its own: torch caches what it has compiled, and counts it, by code object.
        own = FunctionType(call.__code__.replace(), globals(), closure=call.__closure__)
        self._run: Any = torch.compile(own, dynamic=False, fullgraph=compiler.is_exact, backend=compiler.compile_graph)

    def __call__(self, *arguments: Any) -> Any:
        """Returns what the function returns."""
        if not torch.is_grad_enabled():
            return self._function(*arguments)
        compiler = self._compiler
        if self._generation != compiler.generation:
            self._compile()
            self._generation = compiler.generation
        num_graphs, began = compiler.num_graphs, time.perf_counter()
        try:
            with torch.compiler.set_stance("default"):  # an exact run turns off all other compiled code
                return self._run(*arguments)
        except self._refusals as error:
            self._function(*arguments)  # raises a clearer error, if the code fails without being compiled, too
            raise _build_error(error) from error
        finally:
            if compiler.num_graphs != num_graphs:
                compiler.seconds += time.perf_counter() - began


def _read_hooks(module: nn.Module) -> tuple[int, ...]:
    """Returns the numbers of a module's hooks, which torch gives to one hook each."""
    held = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return tuple(number for hooks in held for number in hooks)


def _run_model(model: Any, arguments: Any, named: Any) -> Any:
    return model(*arguments, **named)


def _build_error(error: Exception) -> ModelError:
    if type(error).__name__ == "FailOnRecompileLimitHit":
        return ModelError(
            f"compile=True compiles the model and the loss once for each shape of a shard and for each value of a "
            f"number that their code reads, up to {MAX_GRAPHS} times. This run needs more. Pad the batches to a few "
            "shapes, and put a number that changes into a tensor; or leave compile out."
        )
    quote = str(error).strip()
    quote = quote if len(quote) <= _LONGEST_QUOTE else quote[:_LONGEST_QUOTE] + " …"
    return ModelError(
        "compile=True compiles the model's forward pass and the loss as one graph each, and torch.compile cannot "
        f"compile this code. Change what it names below, leave compile out, or use exact=False, which allows several "
        f"graphs.\n{type(error).__name__}: {quote}"
    )


def _check_options(options: Options, device: torch.device) -> None:
    config: Any = importlib.import_module("torch._dynamo.config")
    if options.precision == "fp16":
        raise ModelError(
            "compile=True does not support precision='fp16', because compiled code hides which gradients were float16. "
            "Use precision='bf16', or leave compile out."
        )
    if options.exact and device.type != "cpu":
        raise ExactError(
            f"compile=True is exact on CPUs only, because on a GPU torch chooses kernels by measuring them. "
            f"Got {device}. Leave compile out, or use exact=False."
        )
    if config.disable:
        raise ModelError(
            "compile=True needs torch.compile, which is turned off by the environment variable TORCHDYNAMO_DISABLE or "
            "TORCH_COMPILE_DISABLE, or by torch._dynamo.config.disable. Unset it, or leave compile out."
        )


def check_settings() -> None:
    """Raises ExactError if the script has changed a setting of torch's compiler, which other processes would lack."""
    for package, set_here in (("_dynamo", _DYNAMO), ("_functorch", {}), ("_inductor", _INDUCTOR)):
        name = f"torch.{package}.config"
        config: Any = importlib.import_module(name)
        for line in config.codegen_config().splitlines():  # of every setting that was ever assigned, also by torch
            key = line.partition(" = ")[0].removeprefix(f"{name}.")
            if key not in config._config or key in set_here or key in _SET_BY_TORCH:
                continue
            if attrgetter(key)(config) != config._config[key].default:
                raise ExactError(
                    "An exact run with compile=True compiles with torch's own settings, because the script's are not "
                    f"sent to other processes. Got {line}. Leave that out, or use exact=False."
                )


def _find_cpp_compiler() -> str:
    """Returns the name and version of the C++ compiler that torch.compile uses; raises PlatformError without one."""
    builder: Any = importlib.import_module("torch._inductor.cpp_builder")
    try:
        compiler = builder.get_cpp_compiler()
    except Exception as error:
        raise PlatformError(
            "compile=True needs a C++ compiler, which torch.compile runs when a step is compiled, and found none on "
            "this host. Install one (apt-get install g++), set the variable CXX to its path, or leave compile out."
        ) from error
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise PlatformError(
            f"compile=True needs the header files of Python, and there is no {headers / 'Python.h'}. Install them "
            "(apt-get install python3-dev), or leave compile out."
        )
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout.partition("\n")[0]
