"""The options of `wrap` that change how a step is computed: precision, gradient clipping, exactness, compilation."""

from dataclasses import dataclass

from lockstep.core.arguments import check_flag, is_number, show
from lockstep.errors import PlanError

PRECISIONS = (None, "bf16", "fp16")


@dataclass(frozen=True)
class Options:
    """The precision of a step, the norm at which its gradient is clipped, and whether its bits must be exact.

    `compile` says whether the framework compiles a shard's pass that it would otherwise run operation by operation.

    >>> Options(precision="bf16", clip_norm=1.0)
    Options(precision='bf16', clip_norm=1.0, exact=True, compile=False)
    """

    precision: str | None = None
    clip_norm: float | None = None
    exact: bool = True
    compile: bool = False

    def __post_init__(self) -> None:
        """Raises PlanError for an unsupported precision or clip_norm."""
        if not isinstance(self.precision, str | None) or self.precision not in PRECISIONS:
            raise PlanError(f"precision={show(self.precision)} is not supported. Use None, 'bf16' or 'fp16'.")
        if self.clip_norm is not None and not (is_number(self.clip_norm) and self.clip_norm > 0):
            raise PlanError(
                f"clip_norm={show(self.clip_norm)} must be a number above 0. Leave clip_norm out to disable clipping."
            )
        for name in ("exact", "compile"):
            object.__setattr__(self, name, check_flag(name, getattr(self, name), PlanError))
