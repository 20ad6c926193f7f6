"""The monitor of a metric, which decides whether one value of the metric is better than another.

For most metrics the name implies whether lower or higher values are better. For other names the script must say so,
because a wrong guess would, for example, stop a run at its worst epoch.
"""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.core.arguments import is_number, show
from lockstep.errors import ModelError

# fmt: off
LOWER_IS_BETTER = frozenset({
    "loss", "error", "err", "mse", "rmse", "msle", "mae", "mape", "nll", "bce", "crossentropy", "perplexity", "ppl",
    "divergence", "kl", "distance", "deviation", "hinge", "regret", "fid", "wer", "cer", "brier",
})
"""Words in the names of metrics whose lower values are better."""

HIGHER_IS_BETTER = frozenset({
    "acc", "accuracy", "auc", "auroc", "auprc", "roc", "top", "f1", "fbeta", "precision", "recall", "sensitivity",
    "specificity", "score", "iou", "dice", "jaccard", "correlation", "kappa", "mcc", "r2", "bleu", "rouge", "psnr",
    "ssim", "ndcg", "mrr", "reward",
})
"""Words in the names of metrics whose higher values are better."""
# fmt: on


@dataclass(frozen=True)
class Monitor:
    """The name of a metric, and the rule by which a value of this metric counts as an improvement.

    An improvement must be larger than `min_delta`. With `mode="auto"` the metric's name decides whether lower values
    ("min") or higher values ("max") are better.

    >>> Monitor("val_loss").mode, Monitor("val_top5_accuracy").mode, Monitor("speed", mode="max").mode
    ('min', 'max', 'max')
    >>> monitor = Monitor("val_accuracy", min_delta=0.01)
    >>> monitor.is_better(0.92, than=0.90), monitor.is_better(0.905, than=0.90), monitor.is_better(0.9, than=None)
    (True, False, True)
    """

    name: str
    mode: str = "auto"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ModelError(
                f"monitor={show(self.name)} is not the name of a metric. Use for example monitor='val_loss'."
            )
        if not isinstance(self.mode, str) or self.mode not in ("auto", "min", "max"):
            raise ModelError(f"mode={self.mode!r} is not supported. Use 'auto', 'min' or 'max'.")
        if not is_number(self.min_delta) or not 0 <= self.min_delta < math.inf:
            raise ModelError(
                f"min_delta={show(self.min_delta)} must be a number, 0 or more: an improvement must be larger than "
                "min_delta. Use min_delta=0."
            )
        if self.mode == "auto":
            object.__setattr__(self, "mode", _infer_mode(self.name))

    def value(self, logs: Mapping[str, float], validated: bool = True) -> float | None:
        """Returns the metric's value in `logs`; None for a validation metric if the epoch had no validation.

        >>> Monitor("loss").value({"loss": 0.5}), Monitor("val_loss").value({"loss": 0.5}, validated=False)
        (0.5, None)
        """
        if self.name not in logs:
            if not validated and self.name.startswith("val_"):
                return None
            near = difflib.get_close_matches(self.name, logs, n=1)
            hint = f" Use {near[0]!r}." if near else " Use one of these."
            if self.name.startswith("val_") and not any(name.startswith("val_") for name in logs):
                hint = " Call fit with validation_data=."
            raise ModelError(
                f"The monitored metric {self.name!r} is not among the metrics of this run: "
                f"{', '.join(map(repr, logs)) or 'none'}.{hint}"
            )
        return float(logs[self.name])

    def is_better(self, value: float, than: float | None) -> bool:
        """Returns whether `value` is an improvement on `than`: every number is if `than` is None, and NaN never is.

        >>> monitor = Monitor("loss")
        >>> monitor.is_better(0.4, than=0.5), monitor.is_better(0.5, than=0.5), monitor.is_better(math.nan, than=None)
        (True, False, False)
        """
        sign = 1.0 if self.mode == "max" else -1.0
        least = -math.inf if than is None or math.isnan(than) else sign * than
        return sign * value > least + self.min_delta


def _infer_mode(name: str) -> str:
    """Returns the mode that a metric's name implies. The last word takes precedence: `top1_error` is an error."""
    words = _split_words(name)
    is_lower, is_higher = not LOWER_IS_BETTER.isdisjoint(words), not HIGHER_IS_BETTER.isdisjoint(words)
    if words[-1] in LOWER_IS_BETTER or (is_lower and not is_higher):
        return "min"
    if is_higher and not is_lower:
        return "max"
    raise ModelError(
        f"It is not known whether lower or higher values of {name!r} are better. Use mode='min' or mode='max'."
    )


def _split_words(name: str) -> list[str]:
    """Returns the lowercase words of a name such as `val_top5_accuracy` or `MeanSquaredError`, without final digits."""
    separated = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", name).lower().replace("cross_entropy", "crossentropy")
    return [
        word if word in LOWER_IS_BETTER | HIGHER_IS_BETTER else word.rstrip("0123456789")
        for word in re.split(r"[\W_]+", separated)
    ]
