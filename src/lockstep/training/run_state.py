"""The state of a run: seed, shards and threads, and the steps and epochs made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from lockstep.core import plan
from lockstep.core.objective import Objective
from lockstep.core.reduction import Reduction
from lockstep.devices import is_cpu
from lockstep.errors import CheckpointError, PlanError, StateError

_NUMBERS = ("step", "epoch", "seed", "shards", "threads")


@dataclass
class Run:
    """Seed, shards and threads, which are part of the result, and the numbers of steps and epochs made.

    Shards and threads that were not given are decided at the first batch, and so is how the loss is taken if it does
    not say so itself.
    """

    seed: int = 0
    shards: int | None = None
    threads: int | None = None
    step: int = 0
    epoch: int = 0
    reduction: Reduction | None = None
    given: frozenset[str] = frozenset()  # what was chosen, and so is not taken from a checkpoint

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        for name in ("shards", "threads"):
            value = getattr(self, name)
            if value is None:
                continue
            if not (_is_integer(value) and value >= 1):
                raise PlanError(f"{name} is a whole number from 1 on. Got {name}={value!r}. Leave it out to choose.")
            setattr(self, name, int(value))  # numpy's integers too, which a checkpoint's JSON does not take
        if self.shards is not None and self.shards > plan.MAX_SHARDS:
            raise PlanError(
                f"shards is the number of parts of a batch, at most {plan.MAX_SHARDS:,}. Got shards={self.shards}. "
                "Use as many as the most devices that this run will ever have, e.g. shards=8."
            )
        if not _is_integer(self.seed):
            raise PlanError(f"seed is a whole number. Got seed={self.seed!r}. Use seed=0.")
        self.seed = int(self.seed)

    def state(self) -> dict[str, int | str | None]:
        """Return the numbers by name, for a checkpoint, and how the loss is taken."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return {**numbers, "reduction": None if self.reduction is None else self.reduction.value}

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> "Run":
        """Return the run that a checkpoint or a backup holds; raise if its numbers mean nothing."""
        reduction = saved_reduction(saved)
        try:
            run = cls(**{name: saved[name] for name in _NUMBERS}, reduction=reduction)
        except (KeyError, PlanError) as error:
            raise CheckpointError(
                f"A manifest holds a run as Lockstep writes it. {_explain(error)} Use another checkpoint."
            ) from None
        if not all(_is_integer(number) and number >= 0 for number in (run.step, run.epoch)):
            raise CheckpointError(
                "A manifest holds a run as Lockstep writes it. Got "
                f"step={run.step!r}, epoch={run.epoch!r}. Use another checkpoint."
            )
        return run

    def check(self, saved: "Run", exact: bool, num_devices: int) -> None:
        """Refuse a saved run with other numbers than those chosen for this one."""
        if saved.shards is not None and saved.shards < num_devices:
            raise StateError(
                f"Every device needs a shard, and a run keeps its shards. The checkpoint has {saved.shards}, this "
                f"run {num_devices} devices. Use devices={saved.shards}, or a new run with shards={num_devices}."
            )
        for name in sorted(self.given):
            chosen, there = getattr(self, name), getattr(saved, name)
            if there not in (None, chosen) and (exact or name == "shards"):
                raise StateError(
                    f"A run keeps its {name}. The checkpoint has {there}, this run was given {name}={chosen}. "
                    f"Leave {name} out, or use {name}={there}"
                    + ("." if name == "shards" else ", or exact=False to go on with another.")
                )

    def take_over(self, saved: "Run") -> None:
        """Go on as the saved run, with those numbers that were not chosen for this one."""
        for name in {*_NUMBERS, "reduction"} - self.given:
            setattr(self, name, getattr(saved, name))

    @property
    def loss_line(self) -> str:
        """The end of the opening line: how the loss is taken, if that was assumed."""
        return ", loss: taken as the mean over examples" if self.reduction is Reduction.ASSUMED else ""

    def note_objective(self, loss: Any) -> None:
        """Note how an objective is taken, once it has been called."""
        if self.reduction is None and isinstance(loss, Objective) and not loss.gives_sum:
            self.reduction = Reduction.ASSUMED

    def describe(self, devices: Sequence[str]) -> str:
        """Return the run in a few words.

        >>> Run(0, 8).describe(["cpu:0", "cpu:1"])
        '2 devices (cpu:0, cpu:1), 8 shards, seed 0, step 0'
        """
        decided = f"{self.shards} shard{'s' * (self.shards > 1)}" if self.shards else "shards chosen at the first batch"
        names = f"{len(devices)} device{'s' * (len(devices) > 1)} ({device_names(devices)})"
        return f"{names}, {decided}, seed {self.seed}, step {self.step}"

    def opening(self, batch_size: int, devices: Sequence[str], note: str = "") -> str:
        """Return the line with which training opens; `note` is what to know about the number of shards.

        >>> Run(0, 8, 1).opening(256, ["cpu:0", "cpu:1"])
        '2 devices (cpu:0, cpu:1), 8 shards of 32, batch 256, 1 thread per shard, seed 0'
        """
        assert self.shards is not None
        assert self.threads is not None
        sizes = sorted(set(plan.sizes(batch_size, self.shards)))
        words = [
            f"{len(devices)} device{'s' * (len(devices) > 1)} ({device_names(devices)})",
            f"{self.shards} shard{'s' * (self.shards > 1)} of {' or '.join(map(str, sizes))}"
            + (f" ({note})" if note else ""),
            f"batch {batch_size}",
        ]
        if is_cpu(devices[0]):
            words.append(f"{self.threads} thread{'s' * (self.threads > 1)} per shard")
        return ", ".join([*words, f"seed {self.seed}"]) + self.loss_line


def saved_reduction(saved: Mapping[str, Any]) -> Reduction | None:
    """Return how the loss was taken in a saved run; before this was saved, always as the mean."""
    if "reduction" not in saved:
        return Reduction.ASSUMED if saved.get("step") else None
    value = saved["reduction"]
    if value not in (None, *(each.value for each in Reduction)):
        raise CheckpointError(
            f"A manifest holds 'reduction' as Lockstep writes it. Got {value!r}. Use another checkpoint."
        )
    return None if value is None else Reduction(value)


def _explain(error: Exception) -> str:
    return f"It lacks {error}." if isinstance(error, KeyError) else str(error)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def device_names(devices: Sequence[str]) -> str:
    """Return the devices' names; of many only the first and the last."""
    return ", ".join(devices) if len(devices) <= 4 else f"{devices[0]} … {devices[-1]}"
