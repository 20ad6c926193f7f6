"""Verification: the same steps at several numbers of devices, compared by digest."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol

from lockstep import keywords
from lockstep.core import batches, digest, plan
from lockstep.core.arguments import show
from lockstep.data import source
from lockstep.devices import choose_similar, is_cpu
from lockstep.errors import DivergedError, ExactError, PlanError

if TYPE_CHECKING:
    from lockstep.trainer import Trainer


@dataclass(frozen=True)
class Verification:
    """The digest after every step, for each number of devices.

    >>> Verification({1: ("a", "b"), 2: ("a", "b")}).equal
    True
    """

    digests: Mapping[int, tuple[str, ...]]

    @property
    def equal(self) -> bool:
        """Whether every number of devices gave the same bits after every step."""
        return len(set(self.digests.values())) == 1


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and value is not True and int(value) >= 1


class Stepper(Protocol):
    """What is verified: something that makes steps and tells the digests of its state."""

    def step(self, batch: Any) -> Any:
        """One step."""

    def digests(self) -> dict[str, str]:
        """The digest of every array of the state."""


def of(trainer: "Trainer[Any]", data: Any, steps: int, devices: Sequence[int], batch_size: int | None) -> Verification:
    """Verifies a trainer, whose state is as before afterwards."""
    batch_size = keywords.checked_optional("batch_size", batch_size)
    if not trainer.exact:
        raise ExactError("verify checks the promise of equal bits. This trainer has exact=False. Use exact=True.")
    if not isinstance(devices, Sequence) or not all(map(_is_count, devices)):
        raise PlanError(f"verify takes numbers of devices, each 1 or more. Got {show(devices)}. Use devices=(1, 2).")
    if len(devices) < 2:
        raise PlanError(f"verify compares at least two runs. Got devices={tuple(devices)}. Use devices=(1, 2).")
    if not _is_count(steps):
        raise PlanError(f"verify makes 1 step or more. Got steps={show(steps)}. Use steps=5.")
    if trainer._open_team is not None and not trainer._open_team.closed:
        trainer._backend.controls()  # refuses what its own workers lack, before others are started that have it
    chosen = source.read_batches(trainer._source(data, batch_size, shuffle=True), steps)
    run, backend = trainer._run, trainer._backend
    accelerated = not is_cpu(trainer._devices[0])
    shards = run.shards or plan.default_shards(batches.count(chosen[0]), max(devices), accelerated)
    state, home = backend.state(), tuple(backend.devices)

    def on(count: int) -> "Trainer[Any]":
        backend.load(state)
        names = choose_similar(trainer._devices, count)
        other = type(trainer)(trainer._recipe, backend, trainer._start, names, replace(run, shards=shards))
        other._opening_shown = True  # nobody trains here: whoever verifies says what came of it
        if len(other.devices) != count:
            raise PlanError(
                f"verify chooses the devices. It wants {count}, and a launcher has set {len(other.devices)}. "
                "Start the script without torchrun or srun."
            )
        return other

    try:
        return verify(on, chosen, devices)
    finally:
        if tuple(backend.devices) != home:
            backend.spread(home)
        backend.load(state)


def verify(
    on: Callable[[int], AbstractContextManager[Stepper]], batches: Sequence[Any], devices: Sequence[int]
) -> Verification:
    """Makes the steps at each count of devices; raises DivergedError at the first difference, with step and tensor."""
    result: dict[int, tuple[str, ...]] = {}
    reference: list[dict[str, str]] = []
    for position, count in enumerate(devices, start=1):
        found = []
        with on(count) as trainer:
            for batch in batches:
                trainer.step(batch)
                found.append(trainer.digests())
        result[count] = tuple(digest.hash_state(each, step) for step, each in enumerate(found, start=1))
        reference = reference or found
        difference = _difference(reference, found)
        if difference is not None:
            raise DivergedError(
                f"Any number of devices gives the same bits. With {count} devices {difference[1]!r} differs from "
                f"{devices[0]} after step {difference[0]}. Look for what one process has and another has not: values "
                "that the model or the loss keeps in attributes, lists or dicts; Python's or NumPy's random numbers; "
                "the process id; the clock." + _untried(devices[position:]),
                result,
            )
    return Verification(result)


def _untried(counts: Sequence[int]) -> str:
    return f" Not tried: {', '.join(map(str, counts))} devices." if counts else ""


def _difference(one: list[dict[str, str]], other: list[dict[str, str]]) -> tuple[int, str] | None:
    """The first step and array that differ."""
    for step, (left, right) in enumerate(zip(one, other, strict=True), start=1):
        for name, value in left.items():
            if right.get(name) != value:
                return step, name
    return None
