"""The breakdown in view: the table that ends `fit(verbose=2)`."""

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from lockstep.callbacks.numerals import duration
from lockstep.core.breakdown import PARTS, Breakdown

_COLUMNS = (*PARTS, "rest")


def view(breakdown: Breakdown) -> Group:
    """Milliseconds of a step and shares of it, a row for each replica; and the sentence on what limits the run."""
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rows.add_column("ms a step")
    for part in _COLUMNS:
        rows.add_column(part, justify="right")
    milliseconds = 1000 * breakdown.seconds / max(1, breakdown.num_steps)
    for replica, device in enumerate(breakdown.devices):
        shares = [breakdown.share(replica, part) for part in _COLUMNS]
        rows.add_row(device, *(f"{share * milliseconds:.2f} ({share:.0%})" for share in shares))
    speed = f"{breakdown.samples_per_second:,.0f} samples/s"
    text = f"{breakdown.num_steps} steps in {duration(breakdown.seconds)} s, {speed}. {breakdown.sentence()}."
    return Group(rows, Text(text))
