"""Puts modules into evaluation mode inside a context, and into training mode for `fit`.

A module with a `train()` of its own may do more than set a flag: a LoRA layer as loralib writes it adds its adapter
to the weight in evaluation mode, and subtracts it in training mode. So such a module's own `train()` sets its mode.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """A context in evaluation mode; on exit restores all modes, and tensors to which a module's own `train()` wrote."""
    modes = _read_modes(model)
    modules = _find_own_train(model)
    # Adding and subtracting an adapter rounds, so the weights cannot be left to the modules.
    tensors = {tensor for module in modules for tensor in (*module.parameters(), *module.buffers())}
    copies = [_Copy(tensor) for tensor in tensors]
    try:
        model.eval()
        yield
    finally:
        try:
            _restore_modes(modules, modes)
        finally:
            for copy in copies:
                copy.restore()


def enter_training_mode(model: nn.Module) -> None:
    """Calls `model.train()` if the root is in evaluation mode, or if a module has a `train()` of its own.

    If the root is in training mode, submodules that the script has put into evaluation mode stay in it. A `train()`
    that the model overrides may put further submodules (batch norms, for example) into evaluation mode.
    """
    if not model.training:
        model.train()
        return
    modules = _find_own_train(model)
    if modules:
        before = _read_modes(model)
        model.train()
        modes = {module: training and module.training for module, training in before.items()}
        _restore_modes([module for module in modules if not before[module]], modes)


class _Copy:
    """A copy of a tensor's bytes, and the memory that the tensor had."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._data = tensor.data  # not the tensor: `tensor.data = other` gives it other memory
        self._bytes = tensor.data.clone()

    def restore(self) -> None:
        # By `.data`, which counts no write: what has its bytes back need not be sent to the other replicas.
        if self._tensor.data_ptr() != self._data.data_ptr() or self._tensor.shape != self._data.shape:
            self._tensor.data = self._data
        self._data.copy_(self._bytes)


def _read_modes(model: nn.Module) -> dict[nn.Module, bool]:
    return {module: module.training for module in model.modules()}


def _find_own_train(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that override `train` by class or by attribute, each after every module that contains it."""
    own = {each for each in model.modules() if getattr(each.train, "__func__", None) is not nn.Module.train}
    if not own:
        return []
    # One that several modules share is called after the last of them, because their `train()` calls its own.
    places = [module for _, module in model.named_modules(remove_duplicate=False)]
    return [module for module in reversed(dict.fromkeys(reversed(places))) if module in own]


def _restore_modes(modules: list[nn.Module], modes: Mapping[nn.Module, bool]) -> None:
    """Calls these modules' own `train()` with their modes, then sets every module's flag."""
    for module in modules:
        module.train(modes[module])
    for module, training in modes.items():
        module.training = training
