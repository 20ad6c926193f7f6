"""The same steps at several numbers of devices, compared by digest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from lockstep.core import batches, digest, plan
from lockstep.core.arguments import show
from lockstep.data import source
from lockstep.devices import choose_similar, is_cpu
from lockstep.errors import DivergedError, ExactError, PlanError
from lockstep.training.call_arguments import checked_optional
from lockstep.training.session import Session


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


def verify(session: Session, data: Any, steps: int, devices: Sequence[int], batch_size: int | None) -> Verification:
    """Make the steps at each number of devices, in a session of its own each; the state is as before afterwards.

    Raises `DivergedError` at the first difference, with its step and tensor.
    """
    batch_size = checked_optional("batch_size", batch_size)
    _check(session, devices, steps)
    backend = session.backend
    if session.has_processes:
        backend.controls()  # refuses what these workers lack, before others are started that have it
    chosen = source.read_batches(session.open_data(data, batch_size, shuffle=True), steps)
    accelerated = not is_cpu(session.own_devices[0])
    shards = session.run.shards or plan.default_shards(batches.count(chosen[0]), max(devices), accelerated)
    state, home = backend.state(), tuple(backend.devices)
    result: dict[int, tuple[str, ...]] = {}
    reference: list[dict[str, str]] = []
    try:
        for position, count in enumerate(devices, start=1):
            backend.load(state)
            found = _digests_on(session, count, shards, chosen)
            result[count] = tuple(digest.hash_state(each, step) for step, each in enumerate(found, start=1))
            reference = reference or found
            difference = _find_difference(reference, found)
            if difference is not None:
                raise DivergedError(
                    f"Any number of devices gives the same bits. With {count} devices {difference[1]!r} differs from "
                    f"{devices[0]} after step {difference[0]}. Look for what one process has and another has not: "
                    "values that the model or the loss keeps in attributes, lists or dicts; Python's or NumPy's random "
                    "numbers; the process id; the clock." + _untried(devices[position:]),
                    result,
                )
    finally:
        if tuple(backend.devices) != home:
            backend.spread(home)
        backend.load(state)
    return Verification(result)


def _check(session: Session, devices: Any, steps: Any) -> None:
    if not session.exact:
        raise ExactError("verify checks the promise of equal bits. This trainer has exact=False. Use exact=True.")
    if not isinstance(devices, Sequence) or not all(map(_is_count, devices)):
        raise PlanError(f"verify takes numbers of devices, each 1 or more. Got {show(devices)}. Use devices=(1, 2).")
    if len(devices) < 2:
        raise PlanError(f"verify compares at least two runs. Got devices={tuple(devices)}. Use devices=(1, 2).")
    if not _is_count(steps):
        raise PlanError(f"verify makes 1 step or more. Got steps={show(steps)}. Use steps=5.")


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and value is not True and int(value) >= 1


def _digests_on(session: Session, num_devices: int, shards: int, chosen: Sequence[Any]) -> list[dict[str, str]]:
    """Return the digests of every array after each step on so many devices."""
    names = choose_similar(session.own_devices, num_devices)
    run = replace(session.run, shards=shards)
    with Session(session.recipe, session.backend, session.start, names, run) as other:
        if len(other.devices) != num_devices:
            raise PlanError(
                f"verify chooses the devices. It wants {num_devices}, and a launcher has set {len(other.devices)}. "
                "Start the script without torchrun or srun."
            )
        found = []
        for batch in chosen:
            other.step(batches.top(batch))
            found.append(other.digests())
        return found


def _untried(counts: Sequence[int]) -> str:
    return f" Not tried: {', '.join(map(str, counts))} devices." if counts else ""


def _find_difference(one: list[dict[str, str]], other: list[dict[str, str]]) -> tuple[int, str] | None:
    """Return the first step and array that differ."""
    for step, (left, right) in enumerate(zip(one, other, strict=True), start=1):
        for name, value in left.items():
            if right.get(name) != value:
                return step, name
    return None
