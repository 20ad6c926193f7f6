"""The line that is printed at the end of an epoch."""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.text import Text

GAP = "  "


@dataclass(frozen=True)
class EpochLine(JupyterMixin):
    """A title followed by facts. Facts that do not fit on the line are printed on further, indented lines.

    A fact is never split over two lines. If a fact is wider than a line, its name is shortened, but not its number,
    because the first digits would be a different number.

    >>> from rich.console import Console
    >>> summary = EpochLine("epoch 1/10", ("loss 0.4120", "accuracy 0.8610", "9.2 s", "6,521 samples/s"))
    >>> Console(width=44, force_terminal=False).print(summary)
    epoch 1/10  loss 0.4120  accuracy 0.8610
                9.2 s  6,521 samples/s
    """

    title: str
    facts: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        indent = " " * cell_len(self.title)
        # rich sets `no_wrap` for output to a file, which has no width.
        room = None if options.no_wrap else options.max_width - len(indent)
        facts = self.facts if room is None else [_shorten(fact, room - len(GAP)) for fact in self.facts]
        first, *others = _join_rows(facts, room)
        title = Text.assemble((self.title, "bold"), first)
        for text in (title, *(Text(indent + row) for row in others)):
            # A line that is too narrow even for a number is folded, so that every digit is shown.
            text.no_wrap, text.overflow = room is None, "ignore" if room is None else "fold"
            yield text


def _shorten(fact: str, room: int) -> str:
    """Returns the fact with its name shortened to fit in `room` columns, if there is room for a part of the name."""
    name, _, number = fact.rpartition(" ")
    left = room - cell_len(number) - 1
    if cell_len(fact) <= room or not name or left < 2:
        return fact
    return f"{set_cell_size(name, left - 1)}… {number}"


def _join_rows(facts: Iterable[str], room: int | None) -> list[str]:
    """Returns the facts joined to rows of at most `room` columns; to one row if `room` is None."""
    rows = [""]
    for fact in facts:
        if room is not None and rows[-1] and cell_len(rows[-1] + GAP + fact) > room:
            rows.append("")
        rows[-1] += GAP + fact
    return rows
