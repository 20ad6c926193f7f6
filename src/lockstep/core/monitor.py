"""The monitor: which of two values of a metric is the better one.

Whether less is better can be told from most names. Where it cannot, the script
says so; a guess would end a run at its worst epoch.
"""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.core.arguments import is_number, show
from lockstep.errors import ModelError

# fmt: off
LESS = frozenset({
    "loss", "error", "err", "mse", "rmse", "msle", "mae", "mape", "nll", "bce", "crossentropy", "perplexity", "ppl",
    "divergence", "kl", "distance", "deviation", "hinge", "regret", "fid", "wer", "cer", "brier",
})
"""Words of metrics of which less is better."""

MORE = frozenset({
    "acc", "accuracy", "auc", "auroc", "auprc", "roc", "top", "f1", "fbeta", "precision", "recall", "sensitivity",
    "specificity", "score", "iou", "dice", "jaccard", "correlation", "kappa", "mcc", "r2", "bleu", "rouge", "psnr",
    "ssim", "ndcg", "mrr", "reward",
})
"""Words of metrics of which more is better."""
# fmt: on


@dataclass(frozen=True)
class Monitor:
    """A metric by name, and what counts as an improvement of it: one of more than `min_delta`.

    With `mode="auto"` the name tells whether less ("min") or more ("max") is better.

    >>> Monitor("val_loss").mode, Monitor("val_top5_accuracy").mode, Monitor("speed", mode="max").mode
    ('min', 'max', 'max')
    >>> monitor = Monitor("val_accuracy", min_delta=0.01)
    >>> monitor.better(0.92, than=0.90), monitor.better(0.905, than=0.90), monitor.better(0.9, than=None)
    (True, False, True)
    """

    name: str
    mode: str = "auto"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ModelError(f"A monitored metric has a name. Got {show(self.name)}. Use for example 'val_loss'.")
        if not isinstance(self.mode, str) or self.mode not in ("auto", "min", "max"):
            raise ModelError(f"A monitor's mode is 'auto', 'min' or 'max'. Got {self.mode!r}. Use one of these.")
        if not is_number(self.min_delta) or not 0 <= self.min_delta < math.inf:
            raise ModelError(
                f"min_delta is the least improvement that counts, 0 or more. Got {show(self.min_delta)}. Use "
                "min_delta=0."
            )
        if self.mode == "auto":
            object.__setattr__(self, "mode", _mode(self.name))

    def value(self, logs: Mapping[str, float], validated: bool = True) -> float | None:
        """The metric's value in `logs`; None for a metric of the validation after an epoch that was not validated.

        >>> Monitor("loss").value({"loss": 0.5}), Monitor("val_loss").value({"loss": 0.5}, validated=False)
        (0.5, None)
        """
        if self.name not in logs:
            if not validated and self.name.startswith("val_"):
                return None
            near = difflib.get_close_matches(self.name, logs, n=1)
            hint = f" Use {near[0]!r}." if near else " Use one of these."
            if self.name.startswith("val_") and not any(name.startswith("val_") for name in logs):
                hint = " Give fit validation_data=."
            raise ModelError(
                f"A monitored metric is measured every epoch. Got {self.name!r}; "
                f"there is {', '.join(map(repr, logs)) or 'none'}.{hint}"
            )
        return float(logs[self.name])

    def better(self, value: float, than: float | None) -> bool:
        """Whether `value` improves on `than`, or on nothing at all; NaN never does.

        >>> monitor = Monitor("loss")
        >>> monitor.better(0.4, than=0.5), monitor.better(0.5, than=0.5), monitor.better(math.nan, than=None)
        (True, False, False)
        """
        sign = 1.0 if self.mode == "max" else -1.0
        least = -math.inf if than is None or math.isnan(than) else sign * than
        return sign * value > least + self.min_delta


def _mode(name: str) -> str:
    """What the words of a name say; the last one counts most: a top-1 error is an error."""
    words = _words(name)
    less, more = not LESS.isdisjoint(words), not MORE.isdisjoint(words)
    if words[-1] in LESS or (less and not more):
        return "min"
    if more and not less:
        return "max"
    raise ModelError(
        f"A monitor knows whether less or more is better. The name {name!r} does not tell. "
        "Use mode='min' or mode='max'."
    )


def _words(name: str) -> list[str]:
    """The words of `val_top5_accuracy` or `MeanSquaredError`, numbers behind them left out."""
    apart = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", name).lower().replace("cross_entropy", "crossentropy")
    return [word if word in LESS | MORE else word.rstrip("0123456789") for word in re.split(r"[\W_]+", apart)]
