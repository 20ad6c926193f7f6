"""What a forward pass leaves in the attributes of modules: nothing that another pass would read.

Attributes belong to the process and not to the state, so what runs on in them from shard to
shard tells how many shards a process has computed. A number or string may be read and not
changed. A tensor may be left there, as an attention map or a table that is built once: that is
tried by computing a shard a second time from the attributes as they were before the pass
before it. The results, and the tensors that it leaves, must have the same bytes. So are numbers
in containers and in objects that are none of the modules, such as the layers of a Keras model.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lockstep.backends.torch.attributes import version
from lockstep.backends.torch.compiled_code import check_modules
from lockstep.backends.torch.held_tensors import Contents, Holder, find_holders, held_tensors, is_number, same_bytes
from lockstep.errors import ExactError

_PLAIN = {bool, int, float, str}
_MODE = "training"  # `train` and `eval` write it whatever it was
TRIALS = 4  # passes that are computed twice once tensors were left somewhere; a maximum shows in one order of two

Place = tuple[int, Any]


class Kept:
    """The attributes during one command: `keep` them, make its `passes`, then `check` that they are what they were."""

    def __init__(self, named: Mapping[str, nn.Module], loss: Any = None) -> None:
        self._named = named
        self._modules = list(dict.fromkeys(named.values()))
        self._loss = loss
        self.way_out = "Make it a buffer: self.register_buffer(name, tensor)"
        self._own = {id(each) for module in self._modules for each in _tensors(module)}
        self._holders: list[Holder] = []
        self._attributes: list[Holder] = []  # of the modules, which come first
        self._versions: list[tuple[Tensor, int]] = []
        self._trusted: set[Place] = set()
        self._trials = TRIALS  # that are still to be made
        self._before: Contents | None = None  # the attributes before the last pass, while it is tried
        self._now: Contents | None = None  # those before the pass that is being made
        self._training = True
        self._commands = 0

    def keep(self, training: bool) -> None:
        """Remembers the attributes as they are before the first pass."""
        changed = [holder for holder in self._attributes if holder.changed()]
        if not self._holders or changed or self._others_changed():  # by the script
            check_modules(self._named)
            self._find()
            self._before = None
        if training != self._training:
            self._training, self._before = training, None

    def passes(self, results: Callable[[], list[Tensor]]) -> Iterator[None]:
        """Yield once for a pass over a shard, and again for the same pass while it is tried what is left of others.

        It is tried while tensors are left in attributes that are not known. `results` gives the tensors of the last
        pass. A generator and no function that calls the pass, so that it adds no frame between the loop and the model.
        """
        if not self._trials or not self._modules:
            yield
            return
        before, self._before = self._before, None
        self._now = Contents(self._holders, self._own, cloned=True)
        yield
        if before is not None:
            yield from self._try(before, self._now, results)
        if self._left():
            self._before = self._now
        self._now = None

    def accept(self) -> None:
        """Take the attributes as they are for those before the pass that is being made, which has begun with a setup.

        Undoing the setup with the pass, to try the next one, would have it made again.
        """
        self._find()
        if self._now is not None:
            self._now = Contents(self._holders, self._own, cloned=True)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Puts every attribute back afterwards, and takes away those that were not there."""
        self.keep(self._training)
        before = Contents(self._holders, self._own, cloned=True)
        try:
            yield
        finally:
            before.put()

    def check(self) -> None:
        """Raises if a number or string has become another, and puts it back.

        Where there was none, one may be set. A tensor may take its place, as of a loss term that begins with 0.
        """
        changed = [holder for holder in self._attributes if holder.changed()]
        for holder in changed:
            self._check_numbers(holder)
        left = self._left() if changed or self._others_changed() else set()
        if not left:
            self._trials, self._before = 0, None
        elif not left <= self._trusted:
            self._trials = self._trials or TRIALS
        else:
            self._commands += 1  # a pass may read later what it does not read now
            self._trials = self._trials or int(self._commands & (self._commands - 1) == 0)
        if left or changed:
            self._find()

    def _find(self) -> None:
        self._holders = find_holders(self._modules, self._loss, self._own)
        self._attributes = self._holders[: len(self._modules)]
        self._versions = held_tensors(self._holders, self._own)

    def _others_changed(self) -> bool:
        rest = self._holders[len(self._attributes) :]
        return any(holder.changed() for holder in rest) or any(version(each) != seen for each, seen in self._versions)

    def _left(self) -> set[Place]:
        """Where the passes since the last look have left other tensors or numbers than were there."""
        written = {id(tensor) for tensor, seen in self._versions if version(tensor) != seen}
        checked = {id(holder.content) for holder in self._attributes}  # whose numbers `check` compares
        found = set()
        for holder in self._holders:
            if not holder.changed() and not (written and written & set(map(id, holder.values))):
                continue
            seen = dict(holder.items())
            content = holder.content if isinstance(holder.content, dict) else dict(enumerate(holder.content))
            found |= {
                (id(holder.content), key if isinstance(holder.content, dict) else None)
                for key, value in content.items()
                if (seen.get(key) is not value or id(value) in written)
                and _is_left(value, self._own, id(holder.content) not in checked)
            }
        return found

    def _try(self, before: Contents, now: Contents, results: Callable[[], list[Tensor]]) -> Iterator[None]:
        """Have the pass made again from the attributes `before` the last one, not those of `now`, and compare."""
        left = self._left()
        after = Contents(self._holders, self._own, cloned=False)
        own = [each.clone() for each in results()]
        before.put()
        try:
            yield
            again = results()
            other = Contents(self._holders, self._own, cloned=False)
        finally:  # also if the pass raises: the loop over this generator then closes it
            after.put()
        where = after.differing(other, now)
        equal = len(own) == len(again) and all(map(_equal, own, again))
        if where or not equal:
            self._trials = TRIALS
            raise ExactError(self._message(where or self._name(left)))
        self._trusted |= left
        self._trials -= 1

    def _name(self, left: set[Place]) -> str:
        names = {id(holder.content): holder for holder in self._holders}
        return min((names[holder].name(key) for holder, key in left), default="an attribute")

    def _message(self, where: str) -> str:
        return (
            "A forward pass leaves nothing in attributes that changes what the next pass gives: it reaches neither "
            "the other processes nor a checkpoint, and would depend on the number of devices. Got other bits for a "
            f"shard after another than by itself, with what is left in {where}. {self.way_out}; or use "
            "lockstep.wrap(..., exact=False)."
        )

    def _check_numbers(self, holder: Holder) -> None:
        now = holder.content
        seen = dict(holder.items())
        changed = [name for name, value in seen.items() if now.get(name) is not value and _is_plain(name, value)]
        changed = [name for name in changed if not isinstance(now.get(name), Tensor)]  # `run` tries what these do
        changed = [name for name in changed if repr(now.get(name)) != repr(seen[name])]  # NaN is NaN
        if changed:
            name, found = changed[0], now.get(changed[0])
            now.update({name: seen[name] for name in changed})
            raise ExactError(
                f"A forward pass leaves the numbers and words of its modules as they are. {name!r} of "
                f"{holder.where} was {seen[name]!r} and is {found!r}, and would depend on the number of "
                "devices. Make it an integer buffer: "
                f"self.register_buffer({name!r}, torch.tensor(0)); or use lockstep.wrap(..., exact=False)."
            )


def _is_plain(name: str, value: Any) -> bool:
    return type(value) in _PLAIN and name != _MODE


def _equal(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and same_bytes(one, other)


def _tensors(module: nn.Module) -> list[Any]:
    return [each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None]


def _is_left(value: Any, own: set[int], numbers: bool, depth: int = 3) -> bool:
    """Whether it is a tensor that is none of the model's own, or a number if these count, or a container of such."""
    if isinstance(value, Tensor):
        return id(value) not in own
    if is_number(value):
        return numbers
    if not depth or not isinstance(value, dict | list | tuple | set):
        return False
    entries = value.values() if isinstance(value, dict) else value
    return any(_is_left(each, own, True, depth - 1) for each in entries)
