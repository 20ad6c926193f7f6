"""Options: how a step is computed, as one object that checks itself."""

from dataclasses import dataclass

from lockstep.core.arguments import check_flag, is_number, show
from lockstep.errors import PlanError

PRECISIONS = (None, "bf16", "fp16")


@dataclass(frozen=True)
class Options:
    """What changes how the step is computed rather than what.

    >>> Options(precision="bf16", clip_norm=1.0)
    Options(precision='bf16', clip_norm=1.0, exact=True)
    """

    precision: str | None = None
    clip_norm: float | None = None
    exact: bool = True

    def __post_init__(self) -> None:
        """Refuses values that mean nothing."""
        if not isinstance(self.precision, str | None) or self.precision not in PRECISIONS:
            raise PlanError(f"precision is None, 'bf16' or 'fp16'. Got {show(self.precision)}. Use one of these.")
        if self.clip_norm is not None and not (is_number(self.clip_norm) and self.clip_norm > 0):
            raise PlanError(f"clip_norm is a number above 0. Got {show(self.clip_norm)}. Leave it out to clip nothing.")
        object.__setattr__(self, "exact", check_flag("exact", self.exact, PlanError))
