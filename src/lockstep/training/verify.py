"""Implements `trainer.verify`: trains the same steps on several numbers of devices and compares the digests."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from lockstep.core import batches, digest, plan
from lockstep.core.arguments import show
from lockstep.data import source
from lockstep.devices import choose_similar, is_cpu
from lockstep.errors import DivergedError, ExactError, PlanError, WorkerError
from lockstep.training.call_arguments import check_optional_integer
from lockstep.training.session import Session


@dataclass(frozen=True)
class Verification:
    """The digests of the state after every step, by number of devices.

    >>> Verification({1: ("a", "b"), 2: ("a", "b")}).equal
    True
    """

    digests: Mapping[int, tuple[str, ...]]

    @property
    def equal(self) -> bool:
        """Whether the digests of all numbers of devices are equal after every step."""
        return len(set(self.digests.values())) == 1


def verify(session: Session, data: Any, steps: int, devices: Sequence[int], batch_size: int | None) -> Verification:
    """Trains the same steps on each number of devices in a separate session, and compares the digests.

    Restores the state afterwards. Raises `DivergedError` at the first difference; it names the step and the array.
    """
    batch_size = check_optional_integer("batch_size", batch_size)
    _check(session, devices, steps)
    backend = session.backend
    if session.has_processes:
        backend.controls()  # raises if the present workers lack a change of the script, which new workers would have
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
                    f"The bits depend on the number of devices. With {count} devices {difference[1]!r} differs from "
                    f"{devices[0]} after step {difference[0]}. Look for values that may differ between processes: "
                    "attributes, lists or dicts of the model or the loss; Python's or NumPy's random numbers; the "
                    "process id; the clock." + _untried(devices[position:]),
                    result,
                )
    finally:
        if tuple(backend.devices) != home:
            backend.spread(home)
        backend.load(state)
    return Verification(result)


def _check(session: Session, devices: Any, steps: Any) -> None:
    if not session.exact:
        raise ExactError(
            "verify cannot be used with exact=False, because the bits may then differ. Use exact=True in lockstep.wrap."
        )
    if not isinstance(devices, Sequence) or not all(map(_is_count, devices)):
        raise PlanError(
            f"verify needs numbers of devices, each 1 or more. Got devices={show(devices)}. Use devices=(1, 2)."
        )
    if len(devices) < 2:
        raise PlanError(
            f"verify needs at least two numbers of devices to compare. Got devices={tuple(devices)}. Use devices=(1, "
            "2)."
        )
    if not _is_count(steps):
        raise PlanError(f"verify needs 1 step or more. Got steps={show(steps)}. Use steps=5.")


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and value is not True and int(value) >= 1


def _digests_on(session: Session, num_devices: int, shards: int, chosen: Sequence[Any]) -> list[dict[str, str]]:
    """Returns, for each step on `num_devices` devices, the digest of every array after the step."""
    names = choose_similar(session.own_devices, num_devices)
    run = replace(session.run, shards=shards)
    with closing(Session(session.recipe, session.backend, session.starter, names, run)) as other:
        if len(other.devices) != num_devices:
            raise PlanError(
                f"verify chooses the number of devices itself, here {num_devices}, but a launcher has set "
                f"{len(other.devices)}. Start the script without torchrun or srun."
            )
        found = []
        for batch in chosen:
            other.step(batches.restore_tuples(batch))
            found.append(other.digests())
            if sum(map(len, other.processes.replicas())) != num_devices:
                raise WorkerError(
                    f"A worker was lost, so that fewer than {num_devices} devices computed step {len(found)}. The line "
                    "that was printed about this worker says why. Call verify again."
                )
        return found


def _untried(counts: Sequence[int]) -> str:
    return f" Not tried: {', '.join(map(str, counts))} devices." if counts else ""


def _find_difference(one: list[dict[str, str]], other: list[dict[str, str]]) -> tuple[int, str] | None:
    """Returns the number of the first step with different digests and the array's name; None if all are equal."""
    for step, (left, right) in enumerate(zip(one, other, strict=True), start=1):
        for name, value in left.items():
            if right.get(name) != value:
                return step, name
    return None
