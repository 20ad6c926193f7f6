"""Verification: the same steps at several numbers of devices, compared by digest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from lockstep.core import digest, plan
from lockstep.core.batches import count as count_examples
from lockstep.errors import DivergedError

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


def verify(trainer: "Trainer", data: Any, steps: int, devices: Sequence[int]) -> Verification:
    """Makes the steps at each count of devices; raises DivergedError at the first difference, with step and tensor."""
    backend, run = trainer._backend, trainer._run
    state, before = backend.state(), (run.step, run.shards, run.threads)
    own, kind = trainer._devices, trainer._devices[0].partition(":")[0]
    batches = list(islice(trainer._source(data, None, shuffle=True).epoch(0), steps))
    result: dict[int, tuple[str, ...]] = {}
    reference: list[dict[str, str]] = []
    if run.shards is None:
        run.shards = plan.default_shards(count_examples(batches[0]), max(devices))
    try:
        for count in devices:
            trainer.close()
            backend.load(state)
            run.step = before[0]
            trainer._devices = own if count == len(own) else tuple(f"{kind}:{index}" for index in range(count))
            found = []
            for batch in batches:
                trainer.step(batch)
                found.append(trainer.digests())
            reference = reference or found
            _compare(reference, found, devices[0], count)
            result[count] = tuple(digest.of_state(each, step) for step, each in enumerate(found, start=1))
    finally:
        trainer.close()
        trainer._devices = own
        backend.load(state)
        run.step, run.shards, run.threads = before
    return Verification(result)


def _compare(one: list[dict[str, str]], other: list[dict[str, str]], first: int, count: int) -> None:
    for step, (left, right) in enumerate(zip(one, other, strict=True), start=1):
        for name, value in left.items():
            if right.get(name) != value:
                raise DivergedError(
                    f"Any number of devices gives the same bits. With {count} devices {name!r} differs from {first} "
                    f"after step {step}. Report this, with the model."
                )
