"""Fitting: the trainer as the loop sees it."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lockstep.callbacks import Callback
from lockstep.core.metrics import Column, Sums
from lockstep.data.source import Source

if TYPE_CHECKING:
    from lockstep.trainer import Trainer


class Fit:
    """The trainer as the loop sees it."""

    def __init__(self, trainer: "Trainer", train: Source, validation_data: Any) -> None:
        self._trainer = trainer
        self._train = train
        self._validation_data = validation_data

    @property
    def stop_training(self) -> bool:
        return self._trainer._team.agree(self._trainer.stop_training)

    def batches(self) -> Iterator[Any]:
        yield from self._train.epoch(self._trainer._run.epoch)

    def train(self, batch: Any) -> Sums:
        return self._trainer._train(batch)

    def columns(self) -> list[Column]:
        return list(self._trainer._backend.columns)

    def validate(self) -> Mapping[str, float]:
        self._trainer._run.epoch += 1
        return {} if self._validation_data is None else self._trainer.evaluate(self._validation_data)


def shown(verbose: bool | int) -> list[Callback]:
    """The progress bar, where one is asked for."""
    if not verbose:
        return []
    from lockstep.callbacks.progress import Progress  # brings rich, which `import lockstep` does not wait for

    return [Progress()]
