"""Summary: the line that a finished epoch leaves behind."""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.text import Text

GAP = "  "


@dataclass(frozen=True)
class Summary(JupyterMixin):
    """A title and the facts after it; what does not fit goes on below, indented, no fact cut in two.

    >>> from rich.console import Console
    >>> summary = Summary("epoch 1/10", ("loss 0.4120", "accuracy 0.8610", "9.2 s", "6,521 samples/s"))
    >>> Console(width=44, force_terminal=False).print(summary)
    epoch 1/10  loss 0.4120  accuracy 0.8610
                9.2 s  6,521 samples/s
    """

    title: str
    facts: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        indent = " " * cell_len(self.title)
        # A file has no width: `no_wrap` is what a console is told for soft wrapping.
        room = None if options.no_wrap else options.max_width - len(indent)
        first, *others = _rows(self.facts, room)
        yield Text.assemble((self.title, "bold"), first, no_wrap=True, overflow="ignore")
        for row in others:
            yield Text(indent + row, no_wrap=True, overflow="ignore")


def _rows(facts: Iterable[str], room: int | None) -> list[str]:
    """Joins the facts, each after a gap, into rows of at most `room` columns."""
    rows = [""]
    for fact in facts:
        if room is not None and rows[-1] and cell_len(rows[-1] + GAP + fact) > room:
            rows.append("")
        rows[-1] += GAP + fact
    return rows
