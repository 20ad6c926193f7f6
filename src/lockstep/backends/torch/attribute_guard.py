"""Detects values that a forward pass leaves in modules' attributes and that another pass reads.

Attributes belong to the process and not to the state. If a pass reads what the pass of another shard has left, the
result depends on how many shards the process has computed. So a number or string of a module must not change. A
tensor may be left, such as an attention map or a table that is built once. To check that no pass reads it, a shard
is computed a second time, from the attributes as they were before the previous pass: the results and the tensors
left must have the same bytes. Numbers in containers and in objects that are not modules of the model, such as the
layers of a Keras model, are checked in this way too.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lockstep.backends.torch.attribute_contents import (
    AttributeSnapshot,
    TrackedContainer,
    find_containers,
    find_tensors,
    has_same_bytes,
    is_number_or_string,
)
from lockstep.backends.torch.attributes import read_version
from lockstep.backends.torch.compiled_code import check_modules
from lockstep.errors import ExactError

_PLAIN = {bool, int, float, str}
TRIALS = 4  # passes that are repeated once tensors were left; a running maximum shows in one of two orders only

Place = tuple[int, Any]


class ModuleAttributeGuard:
    """Checks the attributes during one command: call `begin`, make the passes in `run_passes`, then call `check`."""

    def __init__(self, named: Mapping[str, nn.Module], loss: Any, advice: str) -> None:
        self._named = named
        self._modules = list(dict.fromkeys(named.values()))
        self._loss = loss
        self._advice = advice
        places = [held for module in self._modules for held in (module._parameters, module._buffers)]
        self._own = {id(tensor) for held in places for tensor in held.values() if tensor is not None}
        self._containers: list[TrackedContainer] = []
        self._attributes: list[TrackedContainer] = []  # of the modules, which come first
        self._versions: list[tuple[Tensor, int]] = []
        self._trusted: set[Place] = set()
        self._trials = TRIALS  # still to be made
        self._before: AttributeSnapshot | None = None  # the attributes before the previous pass, while it is tried
        self._now: AttributeSnapshot | None = None  # those before the present pass
        self._training = True
        self._commands = 0

    def begin(self, training: bool) -> None:
        """Records the attributes before the first pass."""
        changed = [container for container in self._attributes if container.has_changed()]
        if not self._containers or changed or self._have_others_changed():  # by the script
            check_modules(self._named)
            self._find()
            self._before = None
        if training != self._training:
            self._training, self._before = training, None

    @property
    def repeats_passes(self) -> bool:
        """Whether `run_passes` may repeat passes, because attributes contain tensors that were not checked enough."""
        return bool(self._trials and self._modules)

    def run_passes(self, results: Callable[[], list[Tensor]]) -> Iterator[None]:
        """Yields once for the pass over a shard, and a second time if the pass is to be repeated for comparison.

        Passes are repeated while attributes contain tensors that were not checked enough. `results` returns the
        tensors of the last pass. This is a generator, and not a function that calls the pass, so that it adds no
        frame between the loop and the model.
        """
        if not self.repeats_passes:
            yield
            return
        before, self._before = self._before, None
        self._now = AttributeSnapshot(self._containers, self._own, cloned=True)
        yield
        if before is not None:
            yield from self._try(before, self._now, results)
        if self._find_left():
            self._before = self._now
        self._now = None

    def accept(self) -> None:
        """Records the attributes again, because the present pass has begun with a one-time setup that wrote to them.

        Otherwise a repetition of the next pass would begin without the setup, and run the setup again.
        """
        self._find()
        if self._now is not None:
            self._now = AttributeSnapshot(self._containers, self._own, cloned=True)

    @contextmanager
    def preserve(self) -> Iterator[None]:
        """A context after which all attributes have their old values, and new ones are removed."""
        self.begin(self._training)
        before = AttributeSnapshot(self._containers, self._own, cloned=True)
        try:
            yield
        finally:
            before.restore()

    def check(self) -> bool:
        """Raises ExactError if a pass changed a number or string, and restores it; returns whether others may differ.

        A new attribute may be set. A tensor may replace a number, as for a loss term that begins with 0.
        """
        changed = [container for container in self._attributes if container.has_changed()]
        for container in changed:
            self._check_numbers(container)
        left = self._find_left() if changed or self._have_others_changed() else set()
        if not left:
            self._trials, self._before = 0, None
        elif not left <= self._trusted:
            self._trials = self._trials or TRIALS
        else:
            self._commands += 1  # a pass may read later what it does not read now
            self._trials = self._trials or int(self._commands & (self._commands - 1) == 0)
        if left or changed:
            self._find()
        return bool(left or changed or not self._modules)

    def _find(self) -> None:
        self._containers = find_containers(self._modules, self._loss, self._own)
        self._attributes = self._containers[: len(self._modules)]
        self._versions = find_tensors(self._containers, self._own)

    def _have_others_changed(self) -> bool:
        rest = self._containers[len(self._attributes) :]
        written = any(read_version(each) != seen for each, seen in self._versions)
        return written or any(container.has_changed() for container in rest)

    def _find_left(self) -> set[Place]:
        """Returns (container's id, key) of every tensor or number that passes have written since the last check."""
        written = {id(tensor) for tensor, seen in self._versions if read_version(tensor) != seen}
        checked = {id(container.content) for container in self._attributes}  # whose numbers `check` compares
        found = set()
        for container in self._containers:
            if not container.has_changed() and not (written and written & set(map(id, container.values))):
                continue
            seen = dict(container.items())
            content = container.content if isinstance(container.content, dict) else dict(enumerate(container.content))
            found |= {
                (id(container.content), key if isinstance(container.content, dict) else None)
                for key, value in content.items()
                if (seen.get(key) is not value or id(value) in written)
                and _is_left(value, self._own, id(container.content) not in checked)
            }
        return found

    def _try(
        self, before: AttributeSnapshot, now: AttributeSnapshot, results: Callable[[], list[Tensor]]
    ) -> Iterator[None]:
        """Yields to repeat the pass from the attributes before the previous pass; raises ExactError if results differ.

        `before` are the attributes before the previous pass, `now` those from which this pass was first computed.
        """
        left = self._find_left()
        after = AttributeSnapshot(self._containers, self._own, cloned=False)
        own = [each.clone() for each in results()]
        before.restore()
        try:
            yield
            again = results()
            other = AttributeSnapshot(self._containers, self._own, cloned=False)
        finally:  # also if the pass raises: the loop over this generator then closes it
            after.restore()
        where = after.find_difference(other, now)
        equal = len(own) == len(again) and all(map(_is_equal, own, again))
        if where or not equal:
            self._trials = TRIALS
            raise ExactError(self._build_message(where or self._describe(left)))
        self._trusted |= left
        self._trials -= 1

    def _describe(self, left: set[Place]) -> str:
        names = {id(container.content): container for container in self._containers}
        return min((names[container].describe(key) for container, key in left), default="an attribute")

    def _build_message(self, where: str) -> str:
        return (
            "A forward pass must not read what an earlier pass has left in an attribute: such a value is neither sent "
            "to other processes nor saved, so results would depend on the number of devices. A shard's results changed "
            f"with what is left in {where}. {self._advice}; or use lockstep.wrap(..., exact=False)."
        )

    def _check_numbers(self, container: TrackedContainer) -> None:
        now = container.content
        seen = dict(container.items())
        changed = [name for name, value in seen.items() if now.get(name) is not value and type(value) in _PLAIN]
        # `train` and `eval` write the mode; `run_passes` tries what tensors do; by repr NaN is equal to NaN.
        changed = [name for name in changed if name != "training" and not isinstance(now.get(name), Tensor)]
        changed = [name for name in changed if repr(now.get(name)) != repr(seen[name])]
        if changed:
            name, found = changed[0], now.get(changed[0])
            now.update({name: seen[name] for name in changed})
            raise ExactError(
                f"A forward pass must not change the numbers and strings of its modules. {name!r} of "
                f"{container.where} was {seen[name]!r} and is {found!r}, so it would depend on the number of "
                "devices. Make it an integer buffer: "
                f"self.register_buffer({name!r}, torch.tensor(0)); or use lockstep.wrap(..., exact=False)."
            )


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and has_same_bytes(one, other)


def _is_left(value: Any, own: set[int], numbers: bool, depth: int = 3) -> bool:
    """Returns whether a value is a tensor not in `own`, a number if `numbers`, or a container of such values."""
    if isinstance(value, Tensor):
        return id(value) not in own
    if is_number_or_string(value):
        return numbers
    if not depth or not isinstance(value, dict | list | tuple | set):
        return False
    entries = value.values() if isinstance(value, dict) else value
    return any(_is_left(each, own, True, depth - 1) for each in entries)
