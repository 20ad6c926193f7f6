"""Kept: the numbers and words of modules during a pass, which may read them and not change them.

They belong to the process and not to the state. What a forward pass counts there runs
on from shard to shard, and so tells how many shards a process has computed.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from lockstep.errors import ExactError

_PLAIN = {bool, int, float, str}
_MODE = "training"  # `train` and `eval` write it whatever it was


class Kept:
    """The plain attributes during one step: `keep` them, then `check` that they are what they were."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(dict.fromkeys(modules))
        self._kept: list[dict[str, Any]] = []

    def keep(self) -> None:
        """Remembers the attributes as they are before the step."""
        self._kept = [vars(module).copy() for module in self._modules]

    def restore(self) -> None:
        """Puts every attribute back, and takes away those that were not there."""
        for module, before in zip(self._modules, self._kept, strict=True):
            vars(module).clear()
            vars(module).update(before)

    def check(self) -> None:
        """Raises where a number or word has become another, and puts it back. Where there was none, one may be set."""
        for module, before in zip(self._modules, self._kept, strict=True):
            now = vars(module)
            changed = [name for name, value in before.items() if now.get(name) is not value and _plain(name, value)]
            changed = [name for name in changed if repr(now.get(name)) != repr(before[name])]  # NaN is NaN
            if changed:
                name, found = changed[0], now.get(changed[0])
                now.update({name: before[name] for name in changed})
                raise ExactError(
                    f"A forward pass leaves the numbers and words of its modules as they are. {name!r} of "
                    f"{type(module).__name__} was {before[name]!r} and is {found!r}, and would depend on the number of "
                    "devices. Make it an integer buffer: "
                    f"self.register_buffer({name!r}, torch.tensor(0)); or use lockstep.wrap(..., exact=False)."
                )


def _plain(name: str, value: Any) -> bool:
    return type(value) in _PLAIN and name != _MODE
