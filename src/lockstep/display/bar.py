"""The progress bar of an epoch, on one line of any width.

On a narrower line the bar gets shorter, then the speed is shown without its unit, then the bar, the speed, the metrics
(the last metric first) and the time left are dropped, in this order. An ellipsis marks what is missing. A number is
never cut off, because its first digits would be a different number; the columns of `rich.progress` would cut it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.display.number_format import format_countdown, format_rate, format_significant

NARROWEST, WIDEST = 6, 30
MARGIN = 3
"""The number of columns left empty at the end, so that a `^C` that the terminal echoes fits on the line."""


@dataclass(frozen=True)
class Speed:
    """A speed: a number of samples or steps per second.

    >>> str(Speed(6521.4, "samples")), Speed(6521.4, "samples").short()
    ('6,521 samples/s', '6,521/s')
    """

    per_second: float
    unit: str

    def __str__(self) -> str:
        return f"{format_rate(self.per_second)} {self.unit}/s"

    def short(self) -> str:
        """Returns the speed as text without its unit, for a narrow line."""
        return f"{format_rate(self.per_second)}/s"


@dataclass(frozen=True)
class Bar(JupyterMixin):
    """The progress of an epoch at one moment, as a line that rich can print.

    >>> from rich.console import Console
    >>> bar = Bar(title="epoch 1/10", step=12, steps=24, values={"loss": 0.5}, left=7.0)
    >>> Console(width=60, force_terminal=False).print(bar)
    epoch 1/10 ━━━━━━━━━          12/24 loss 0.5000 0:07 left
    """

    title: str
    step: int
    steps: int | None = None
    """The number of steps in the epoch; None if it is not known, and then the bar only moves back and forth."""
    values: Mapping[str, float] = field(default_factory=dict)
    speed: Speed | None = None
    left: float | None = None
    """The estimated number of seconds until the last step of the epoch."""
    note: str = ""
    seconds: float = 0.0
    """The seconds since the epoch began, which animate the bar if `steps` is None."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width - MARGIN
        cells = self._cells(str(self.speed) if self.speed else "", len(self.values), self._end)
        if _width(cells) + (NARROWEST + 1 if self.speed else 0) > width:
            cells = next((cells for cells in self._shorten_step_by_step() if _width(cells) <= width), [])
        room = width - _width(cells) - 1
        table = Table.grid(padding=(0, 1, 0, 0))
        row: list[Text | ProgressBar] = list(cells)
        if room >= NARROWEST:
            row.insert(1, self._bar(min(room, WIDEST)))
        table.add_row(*row)
        yield from console.render(table, options.update_width(max(width, 1)))

    @property
    def _end(self) -> str:
        return self.note or ("" if self.left is None else f"{format_countdown(self.left)} left")

    def _shorten_step_by_step(self) -> Iterator[list[Text]]:
        """Yields the texts beside the bar for ever narrower lines; the least important texts are dropped first."""
        speeds = [self.speed.short(), ""] if self.speed else [""]
        for end in (self._end, ""):
            for num_values in range(len(self.values), 0, -1):
                yield from (self._cells(speed, num_values, end) for speed in speeds)
        yield self._cells("", 0, self._end)
        yield self._cells("", 0, "")
        yield self._cells("", 0, "")[:2]
        yield self._cells("", 0, "")[:1]

    def _cells(self, speed: str, num_values: int, end: str) -> list[Text]:
        """Returns the texts beside the bar that are not empty: title, step, speed, `num_values` values, and `end`."""
        step = f"{self.step:>{len(str(self.steps))}}/{self.steps}" if self.steps else f"step {self.step}"
        values = [f"{name} {format_significant(value)}" for name, value in self.values.items()]
        whole = num_values == len(values) and end == self._end and (speed or not self.speed)
        shown = "  ".join([*values[:num_values], *([] if whole else ["…"])])
        texts = [
            Text(self.title, style="bold"),
            Text(step),
            Text(speed, style="cyan"),
            Text(shown, style="green"),
            Text(end, style="dim"),
        ]
        for text in texts:
            text.no_wrap = True
        return [text for text in texts if text.plain]

    def _bar(self, width: int) -> ProgressBar:
        return ProgressBar(
            total=self.steps, completed=self.step, width=width, pulse=self.steps is None, animation_time=self.seconds
        )


def _width(cells: Sequence[Text]) -> int:
    """Returns the width of the texts in columns, with one column between two texts."""
    return sum(cell_len(cell.plain) for cell in cells) + len(cells) - 1
