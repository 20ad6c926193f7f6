"""The callback that shows the progress of `fit`.

Reading the loss, which on a GPU waits for the device, and drawing the progress bar take far longer than a small step.
So a step only reads the clock, and the bar is drawn ten times a second.
"""

from collections import deque
from collections.abc import Callable
from time import perf_counter

from rich.console import Console
from rich.text import Text

from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.display.bar import Bar, Speed
from lockstep.display.epoch_line import EpochLine
from lockstep.display.number_format import format_duration, format_significant, to_float
from lockstep.display.terminal import Screen, choose_screen, standard_console
from lockstep.display.time_table import render_breakdown

SECONDS_BETWEEN_DRAWS = 0.1
DRAWS_IN_PACE = 32


class Pace:
    """Measures the number of steps per second over the last few draws of the progress bar.

    >>> pace = Pace()
    >>> for second, step in ((0.0, 0), (10.0, 1), (10.5, 6)):
    ...     pace.add(second, step)
    >>> pace.steps_per_second()
    10.0
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque(maxlen=DRAWS_IN_PACE)

    def add(self, second: float, step: int) -> None:
        """Records that `step` steps had been finished at the time `second`."""
        # The first step includes compilation and warm-up, so it is dropped as soon as later steps are known.
        if len(self._marks) == 2 and self._marks[0][1] == 0:
            self._marks.popleft()
        self._marks.append((second, step))

    def steps_per_second(self) -> float | None:
        """Returns the number of steps per second; None before the second draw."""
        if len(self._marks) < 2:
            return None
        (start, before), (end, after) = self._marks[0], self._marks[-1]
        return (after - before) / (end - start) if end > start and after > before else None


class Progress(Callback):
    """Prints one line per finished epoch, and in a terminal or notebook also shows a progress bar.

    `fit` adds this callback unless `verbose=0`. At the start it prints the trainer's opening line, and, for a resumed
    run, the checkpoint; at the end it prints `history.summarize()`. `console` and `clock` are for tests.

    >>> from types import SimpleNamespace
    >>> from lockstep.callbacks import CallbackList, History
    >>> history = History(devices=("cpu:0",))
    >>> opening = "1 device (cpu:0), 8 shards of 32, batch 256"
    >>> trainer = SimpleNamespace(opening=opening, resumed="", history=history, breakdown=None)
    >>> params = {"epochs": 1, "steps": 1, "batch_size": 256, "examples": 256}
    >>> callbacks = CallbackList([Progress(console=Console(force_terminal=False))], trainer, params)
    >>> callbacks.on_train_begin()
    1 device (cpu:0), 8 shards of 32, batch 256
    >>> callbacks.on_epoch_begin(0)
    >>> callbacks.on_train_batch_end(0, {"loss": 0.412})
    >>> history.record(0, {"loss": 0.412, "accuracy": 0.861}, seconds=0.5)
    >>> callbacks.on_epoch_end(0, {"loss": 0.412, "accuracy": 0.861})
    epoch 1/1  loss 0.4120  accuracy 0.8610  0.5 s  512 samples/s
    >>> callbacks.on_train_end()
    train acc: 0.86, 0.5 sec/epoch on 1 device: cpu:0
    >>> callbacks.close()
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = perf_counter) -> None:
        self._console = console or standard_console()
        self._clock = clock
        self._screen: Screen = choose_screen(self._console)
        self._has_opened = False
        self._epoch: int | None = None
        self._done = 0

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        self._screen = choose_screen(self._console)
        self._has_opened = False
        self._print_opening()

    def on_epoch_begin(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        self._epoch = epoch
        self._done = 0
        self._batch = -1
        self._values: dict[str, float] = {}
        self._trained: float | None = None
        self._began = self._drawn = self._clock()
        self._pace = Pace()
        self._pace.add(self._began, 0)
        if self._has_opened:
            self._draw()

    def on_train_batch_end(self, batch: int, logs: Logs = NO_LOGS) -> None:
        self._done += 1
        self._batch = batch
        if not self._has_opened:
            self._print_opening()
        if not self._screen.live:
            return
        now = self._clock()
        if now - self._drawn >= SECONDS_BETWEEN_DRAWS:
            self._values = {name: to_float(value) for name, value in logs.items()}
            # The clock is read again, because reading the values may have waited for the device.
            self._drawn = self._clock()
            self._pace.add(self._drawn, self._done)
            self._draw()

    def on_test_begin(self, logs: Logs = NO_LOGS) -> None:
        if self._epoch is not None:
            self._trained = self._clock() - self._began
            self._draw(note="validating")

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        values = (f"{name} {format_significant(value)}" for name, value in logs.items())
        recorded = self._read_recorded_seconds(epoch)
        seconds = self._measure_seconds() if recorded is None else recorded
        # The recorded time is that of the whole epoch, even if the run was resumed in the middle of the epoch.
        steps = self._done if recorded is None else self._batch + 1
        facts = [*values, f"{format_duration(seconds)} s"]
        if speed := self._speed(steps / seconds if steps and seconds > 0 else None):
            facts.append(str(speed))
        self._epoch = None
        self._screen.keep(EpochLine(self._title(epoch), tuple(facts)))

    def on_train_end(self, logs: Logs = NO_LOGS) -> None:
        self._screen.keep(Text(self.trainer.history.summarize()))
        if self.trainer.breakdown is not None:
            self._screen.keep(render_breakdown(self.trainer.breakdown))

    def close(self) -> None:
        """Makes the cursor visible again. The bar of an unfinished epoch remains on the screen."""
        self._epoch = None
        self._screen.close()

    def _print_opening(self) -> None:
        """Prints the opening line if it is known already; it may be known only after the first batch."""
        if self.trainer.opening:
            self._screen.keep(Text(self.trainer.opening))
            if resumed := getattr(self.trainer, "resumed", ""):
                self._screen.keep(Text(resumed))
            self._has_opened = True

    def _draw(self, note: str = "") -> None:
        if not self._screen.live or self._epoch is None:
            return
        pace = self._pace.steps_per_second()
        steps = self.params.get("steps")
        left = (steps - self._batch - 1) / pace if steps and pace else None
        self._screen.show(
            Bar(
                title=self._title(self._epoch),
                step=self._batch + 1,
                steps=steps,
                values=self._values,
                speed=self._speed(pace),
                left=left,
                note=note,
                seconds=self._drawn - self._began,
            )
        )

    def _title(self, epoch: int) -> str:
        epochs = self.params.get("epochs") or epoch + 1
        return f"epoch {epoch + 1:>{len(str(epochs))}}/{epochs}"

    def _read_recorded_seconds(self, epoch: int) -> float | None:
        """Returns the training time of the epoch from the history; None if the history does not have this epoch."""
        history = self.trainer.history
        return float(history.seconds[-1]) if history.epoch and history.epoch[-1] == epoch else None

    def _measure_seconds(self) -> float:
        return self._clock() - self._began if self._trained is None else self._trained

    def _speed(self, steps_per_second: float | None) -> Speed | None:
        """Returns the speed in samples per second if the batch size is known, otherwise in steps per second."""
        if steps_per_second is None:
            return None
        params = self.params
        batch_size, examples, steps = params.get("batch_size"), params.get("examples"), params.get("steps")
        if batch_size and not (examples and (self._batch + 1) * batch_size > examples):
            return Speed(steps_per_second * batch_size, "samples")
        if examples and steps:
            # The last batch was smaller, or the batch sizes differ: use the mean over the epoch.
            return Speed(steps_per_second * examples / steps, "samples")
        return Speed(steps_per_second, "steps")
