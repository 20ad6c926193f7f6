"""The state of a run beside the arrays: seed, shards, threads, and the numbers of steps and epochs so far."""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from lockstep.core import plan
from lockstep.core.loss_reduction import Reduction
from lockstep.core.objective import Objective
from lockstep.errors import CheckpointError, PlanError, StateError

_NUMBERS = ("step", "epoch", "seed", "shards", "threads")


@dataclass
class Run:
    """The seed, shards and threads of a run, which determine its result, and its numbers of steps and epochs so far.

    Shards and threads that were not given are chosen at the first batch. Whether the loss is a sum or a mean is found
    out at the first batch too, if the loss does not say so itself.
    """

    seed: int = 0
    shards: int | None = None
    threads: int | None = None
    step: int = 0
    epoch: int = 0
    reduction: Reduction | None = None
    given: frozenset[str] = frozenset()  # the names of the values given to `wrap`, which a checkpoint does not replace

    def __post_init__(self) -> None:
        """Raises PlanError if the shards, the threads or the seed are not valid."""
        for name in ("shards", "threads"):
            value = getattr(self, name)
            if value is None:
                continue
            if not (_is_integer(value) and value >= 1):
                raise PlanError(
                    f"{name} must be an integer, 1 or more. Got {name}={value!r}. Leave {name} out to use the default."
                )
            setattr(self, name, int(value))  # converts integers of numpy, which JSON does not accept
        if self.shards is not None and self.shards > plan.MAX_SHARDS:
            raise PlanError(
                f"shards={self.shards} is more than the limit of {plan.MAX_SHARDS:,}. Use the largest number of "
                "devices that this run will ever have, e.g. shards=8."
            )
        if not _is_integer(self.seed):
            raise PlanError(f"seed must be an integer. Got seed={self.seed!r}. Use seed=0.")
        self.seed = int(self.seed)

    def state(self) -> dict[str, int | str | None]:
        """Returns the seed, shards, threads, step, epoch and reduction of the run as a dict, for a checkpoint."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return {**numbers, "reduction": None if self.reduction is None else self.reduction.value}

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> "Run":
        """Returns the run in a checkpoint or backup; raises CheckpointError if its values are missing or not valid."""
        reduction = saved_reduction(saved)
        try:
            run = cls(**{name: saved[name] for name in _NUMBERS}, reduction=reduction)
        except (KeyError, PlanError) as error:
            raise CheckpointError(
                "The checkpoint or backup cannot be read, because it is damaged or was not written by Lockstep: "
                f"{_explain(error)} Use another checkpoint or backup."
            ) from None
        if not all(_is_integer(number) and number >= 0 for number in (run.step, run.epoch)):
            raise CheckpointError(
                "The checkpoint or backup cannot be read, because it is damaged or was not written by Lockstep: it has "
                f"step={run.step!r} and epoch={run.epoch!r}. Use another checkpoint or backup."
            )
        return run

    def check(self, saved: "Run", exact: bool, num_devices: int) -> None:
        """Raises StateError if this run cannot continue a saved run.

        This is the case if the saved run has fewer shards than this run has devices, or if its shards, threads or seed
        differ from a value that was given to `wrap`.
        """
        if saved.shards is not None and saved.shards < num_devices:
            raise StateError(
                f"The checkpoint has shards={saved.shards}, which a resumed run must keep, and this run has "
                f"{num_devices} devices, each of which needs a shard. Use devices={saved.shards}, or begin a new run "
                f"with shards={num_devices}."
            )
        for name in sorted(self.given):
            chosen, there = getattr(self, name), getattr(saved, name)
            if there not in (None, chosen) and (exact or name == "shards"):
                raise StateError(
                    f"The checkpoint has {name}={there}, which a resumed run must keep, and this run was given "
                    f"{name}={chosen}. Leave {name} out, or use {name}={there}"
                    + ("." if name == "shards" else ", or exact=False to continue with another value.")
                )

    def take_over(self, saved: "Run") -> None:
        """Copies the values of a saved run into this run, except those that were given to `wrap`."""
        for name in {*_NUMBERS, "reduction"} - self.given:
            setattr(self, name, getattr(saved, name))

    def note_objective(self, loss: Any) -> None:
        """Records that the loss of an objective is used as a mean, if its first call did not return a `Sum`."""
        if self.reduction is None and isinstance(loss, Objective) and not loss.gives_sum:
            self.reduction = Reduction.ASSUMED


def saved_reduction(saved: Mapping[str, Any]) -> Reduction | None:
    """Returns the reduction of the loss in a saved run.

    Runs that an older version saved have no reduction; in these the loss was used as a mean.
    """
    if "reduction" not in saved:
        return Reduction.ASSUMED if saved.get("step") else None
    value = saved["reduction"]
    if value not in (None, *(each.value for each in Reduction)):
        raise CheckpointError(
            "The checkpoint or backup cannot be read, because it is damaged or was not written by Lockstep: it has "
            f"reduction={value!r}. Use another checkpoint or backup."
        )
    return None if value is None else Reduction(value)


def _explain(error: Exception) -> str:
    return f"it has no {error}." if isinstance(error, KeyError) else str(error)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
