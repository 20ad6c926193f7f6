"""Options: how a step is computed."""

from dataclasses import dataclass

from lockstep.core.arguments import check_flag, is_number, show
from lockstep.errors import PlanError

PRECISIONS = (None, "bf16", "fp16")


@dataclass(frozen=True)
class Options:
    """Options of the computation of a step, validated.

    >>> Options(precision="bf16", clip_norm=1.0)
    Options(precision='bf16', clip_norm=1.0, exact=True)
    """

    precision: str | None = None
    clip_norm: float | None = None
    exact: bool = True

    def __post_init__(self) -> None:
        """Raises PlanError for invalid values."""
        if not isinstance(self.precision, str | None) or self.precision not in PRECISIONS:
            raise PlanError(f"precision={show(self.precision)} is not supported. Use None, 'bf16' or 'fp16'.")
        if self.clip_norm is not None and not (is_number(self.clip_norm) and self.clip_norm > 0):
            raise PlanError(
                f"clip_norm={show(self.clip_norm)} is not a number above 0. Leave it out to disable clipping."
            )
        object.__setattr__(self, "exact", check_flag("exact", self.exact, PlanError))
