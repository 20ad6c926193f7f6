"""The report of a run: collects what happens in a `fit`, and writes it as one HTML file after every epoch."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lockstep.core.atomic_file import replace_file
from lockstep.core.attempt import Attempt
from lockstep.core.step_bins import StepBins
from lockstep.display.number_format import format_duration, format_significant
from lockstep.display.report import page
from lockstep.display.report.curve_plots import render_panels
from lockstep.display.report.ticks import format_elapsed
from lockstep.display.report.time_plots import RunEvent, render_times, render_totals

MAX_EPOCHS, MIN_EPOCHS = 400, 50  # in the table and the curves; of a longer run every second epoch is shown, and so on
MAX_VALUES = 3000  # of all metrics together
MAX_EVENTS = 200
MAX_PLANS, MAX_PLANNED = 12, 500  # plans, and shards in all of them
MAX_TEXT = 400  # characters of a line that was printed


class Report:
    """Writes the report of a `fit` to a file. `facts` are lines about the program, such as its command.

    The file has a bounded size: for a long run, adjacent steps share a column and some epochs are left out.
    """

    def __init__(self, path: Path, start: float, started: str, facts: Mapping[str, str]) -> None:
        self.path, self._start, self._facts = path, start, {"started": started, **facts}
        self._now = start  # the last time that was seen
        self._bins: StepBins | None = None
        self._devices: dict[int, str] = {}
        self.events: list[RunEvent] = []
        self.plans: list[tuple[int, tuple[int, ...]]] = []  # the step from which a plan holds, and its owners
        self._replicas: set[int] = set()  # that make the steps at present
        self._digests: dict[int, str] = {}
        self._waiting = 0.0  # seconds for data, which belong to the next step
        # Before the first step, so that a path that cannot be written is noticed now.
        replace_file(path, page.render_page(path.stem, "waiting for the first step", [], {}).encode())

    def add_attempt(self, attempt: Attempt, devices: Sequence[str], ended: float) -> None:
        """Adds the times of a step, and notes which devices have come and gone."""
        self._now = ended
        self._devices.update((replica, devices[replica]) for replica in attempt.plan.replicas if replica < len(devices))
        bins = self._find_bins(attempt.step)
        for replica in attempt.lost:
            self._add_event("lost", attempt.step, f"{self._name(replica)} was lost")
        if not attempt.is_committed:
            began = min((timing.start for own in attempt.timings.values() for timing in own), default=ended)
            bins.add_pause(attempt.step, "repeated", ended - began)
            self._replicas -= set(attempt.lost)
            return
        if not attempt.is_step:  # a pass for gradients
            self._replicas -= set(attempt.lost)
            return
        if self._waiting:
            bins.add_pause(attempt.step, "waiting for data", self._waiting)
            self._waiting = 0.0
        bins.add_step(attempt.step, attempt.timings, ended - self._start)
        present = set(attempt.plan.replicas)
        if self.plans:
            for kind, changed in (("joined", present - self._replicas), ("left", self._replicas - present)):
                for replica in sorted(changed):
                    self._add_event(kind, attempt.step, f"{self._name(replica)} has {kind}")
        self._replicas = present - set(attempt.lost)
        if not self.plans or self.plans[-1][1] != attempt.plan.owners:
            self.plans.append((attempt.step, attempt.plan.owners))
            limit = max(1, min(MAX_PLANS, MAX_PLANNED // len(attempt.plan.owners)))
            del self.plans[1:-limit]  # the first and the last are kept

    def add_pause(self, reason: str, start: float, end: float, step: int) -> None:
        """Adds a time in which no step was made; a checkpoint belongs to the step before it."""
        self._now = end
        if reason == "input":
            self._waiting += end - start
        elif reason == "checkpoint":
            bins = self._find_bins(step)
            step = max(step - 1, bins.first_step)
            bins.add_pause(step, reason, end - start)
            bins.add_save(step)

    def add_notice(self, text: str, when: float, step: int) -> None:
        """Adds a line that was printed."""
        self._now = when
        self._add_event("notice", step, text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…")

    def end_epoch(self, trainer: Any, digest: str) -> None:
        """Writes the report with the epoch that has ended."""
        self.add_epoch(trainer.history.epoch[-1], digest)
        self._write(trainer, f"running, epoch {trainer.history.epoch[-1] + 1} has ended")

    def add_epoch(self, epoch: int, digest: str) -> None:
        """Adds the digest of the state after an epoch."""
        self._digests[epoch] = digest

    def close(self, trainer: Any, outcome: str) -> None:
        """Writes the report with the outcome of the training."""
        self._write(trainer, outcome)

    def _write(self, trainer: Any, status: str) -> None:
        replace_file(self.path, self._render(trainer, status).encode())

    def _find_bins(self, step: int) -> StepBins:
        if self._bins is None:
            self._bins = StepBins(step)
        return self._bins

    def _name(self, replica: int) -> str:
        return self._devices.get(replica, f"replica {replica}")

    def _add_event(self, kind: str, step: int, text: str) -> None:
        self.events.append(RunEvent(kind, step, self._now - self._start, text))
        del self.events[:-MAX_EVENTS]

    def _render(self, trainer: Any, status: str) -> str:
        history, bins = trainer.history, self._bins
        shown = _choose_epochs(len(history.epoch), len(history.history))
        epochs = [history.epoch[index] for index in shown]
        curves = {name: [column[index] for index in shown] for name, column in history.history.items()}
        panels, panel_data = render_panels(epochs, curves)
        data: dict[str, Any] = {"epochs": epochs, "panels": panel_data}
        opening = f'<p class="opening">{escape(trainer.opening or "No step has been made yet.")}</p>'
        if trainer.resumed:
            opening += f"<p>{escape(trainer.resumed)}</p>"
        opening += f"<p><small>{escape(_describe_result(history))}</small></p>" if epochs else ""
        sections = [("", opening)]
        if panels:
            sections.append(("Curves", f'<div class="panels">{panels}</div>'))
        if bins is not None and bins.replicas:
            devices = [self._name(replica) for replica in sorted(bins.replicas)]
            html, data["times"] = render_times(bins, devices, self.events)
            sections.append(("Time of each step", page.render_tabs() + html + render_totals(bins, devices)))
            plans = "".join(
                f"<small>from step {step:,}</small>{page.render_plan(owners, self._devices)}"
                for step, owners in self.plans
            )
            sections.append(("Who computes which shards", f'<div class="plans">{plans}</div>'))
        if epochs:
            sections.append(("Epochs", self._render_table(history, shown, list(curves))))
        log = [event for event in self.events if event.kind not in ("lost", "joined")]  # which a notice explains
        if log:
            sections.append(("Events", page.render_log(log)))
        facts = {**self._facts, "run time": format_elapsed(self._now - self._start)}
        sections.append(("Program", page.render_facts(facts)))
        name = type(trainer.model).__name__
        return page.render_page(f"{name}: {self.path.stem}", status, sections, data)

    def _render_table(self, history: Any, shown: Sequence[int], names: Sequence[str]) -> str:
        rows = [
            (
                history.epoch[index],
                [format_significant(history.history[name][index]) for name in names],
                f"{format_duration(history.seconds[index])} s",
                self._digests.get(history.epoch[index], ""),
            )
            for index in shown
        ]
        note = "A digest is the sha256 of parameters, optimizer state and buffers: equal digests, equal bits."
        if len(shown) < len(history.epoch):
            note += f" {len(shown)} of {len(history.epoch):,} epochs are shown."
        return page.render_epochs(names, rows, note)


def _describe_result(history: Any) -> str:
    return str(history.summarize())


def _choose_epochs(count: int, num_columns: int) -> list[int]:
    """Returns the indices of a bounded number of epochs, evenly spaced, with the last.

    >>> _choose_epochs(3, 4), _choose_epochs(1000, 4)[-2:], len(_choose_epochs(1000, 4))
    ([0, 1, 2], [996, 999], 251)
    """
    stride, limit = 1, max(MIN_EPOCHS, min(MAX_EPOCHS, MAX_VALUES // max(num_columns, 1)))
    while count > stride * limit:
        stride *= 2
    return sorted({*range(0, count, stride), *([count - 1] if count else [])})
