"""The line printed at the end of an epoch."""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.text import Text

GAP = "  "


@dataclass(frozen=True)
class EpochLine(JupyterMixin):
    """A title and the facts after it; what does not fit goes on below, indented, no fact cut in two.

    Of a fact that is wider than a line the name is shortened, never the number, whose first digits are another number.

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
        # A file has no width: `no_wrap` is what a console is told for soft wrapping.
        room = None if options.no_wrap else options.max_width - len(indent)
        facts = self.facts if room is None else [_shortened(fact, room - len(GAP)) for fact in self.facts]
        first, *others = _rows(facts, room)
        title = Text.assemble((self.title, "bold"), first)
        for text in (title, *(Text(indent + row) for row in others)):
            # Too narrow for a number alone, it is folded, so that every digit is there.
            text.no_wrap, text.overflow = room is None, "ignore" if room is None else "fold"
            yield text


def _shortened(fact: str, room: int) -> str:
    """The fact in at most `room` columns, if the number at its end leaves some for its name."""
    name, _, number = fact.rpartition(" ")
    left = room - cell_len(number) - 1
    if cell_len(fact) <= room or not name or left < 2:
        return fact
    return f"{set_cell_size(name, left - 1)}… {number}"


def _rows(facts: Iterable[str], room: int | None) -> list[str]:
    """Joins the facts, each after a gap, into rows of at most `room` columns."""
    rows = [""]
    for fact in facts:
        if room is not None and rows[-1] and cell_len(rows[-1] + GAP + fact) > room:
            rows.append("")
        rows[-1] += GAP + fact
    return rows
