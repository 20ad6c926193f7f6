"""The table of the time that each part of a step takes, which `fit(verbose=2)` prints at the end."""

from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.jupyter import JupyterMixin
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lockstep.core.time_breakdown import PARTS, Breakdown
from lockstep.display.epoch_line import EpochLine
from lockstep.display.number_format import format_duration

_COLUMNS = (*PARTS, "rest")
_ANY = 1000  # the number of columns within which the width of the table is measured


def render_breakdown(breakdown: Breakdown) -> Group:
    """Returns a table with the time of each part of a step for each replica, and a sentence on what limits the run."""
    speed = f"{breakdown.samples_per_second:,.0f} samples/s"
    text = (
        f"{breakdown.num_steps} steps in {format_duration(breakdown.seconds)} s, {speed}. {breakdown.describe_limit()}."
    )
    return Group(_Parts(breakdown), Text(text))


@dataclass(frozen=True)
class _Parts(JupyterMixin):
    """The table of times, which becomes a line for each replica if the terminal is too narrow for a table."""

    breakdown: Breakdown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("ms a step")
        for part in _COLUMNS:
            table.add_column(part, justify="right")
        rows = {device: self._values(replica) for replica, device in enumerate(self.breakdown.devices)}
        for device, values in rows.items():
            table.add_row(device, *values)
        least = Measurement.get(console, options.update_width(_ANY), table).minimum
        if least <= options.max_width or options.no_wrap:
            yield table
            return
        for device, values in rows.items():
            facts = (f"{part} {value}" for part, value in zip(_COLUMNS, values, strict=True))
            yield EpochLine(device, ("ms a step:", *facts))

    def _values(self, replica: int) -> list[str]:
        breakdown = self.breakdown
        milliseconds = 1000 * breakdown.seconds / max(1, breakdown.num_steps)
        shares = [breakdown.share(replica, part) for part in _COLUMNS]
        return [f"{share * milliseconds:.2f} ({share:.0%})" for share in shares]
