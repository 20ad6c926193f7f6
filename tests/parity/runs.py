"""Runs: the same batches on a trainer, with everything that must be equal written down after every step."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import lockstep
from parity import recorded
from parity.matrix import Entry


@dataclass(frozen=True)
class Case:
    """A row of the matrix: batches to step through, then data for `fit`, then batches to evaluate and predict."""

    name: str
    shards: int
    batches: Sequence[Any] = ()
    fit: tuple[Any, int] | None = None  # the data and the batch size
    forward: Sequence[tuple[Any, Any]] = ()  # (what `evaluate` takes, what `predict` takes)


@dataclass
class Record:
    """What one case gave: after every step the digest of each tensor, and the bits of each number in the logs."""

    devices: int
    steps: list[Mapping[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    def equal(self, reference: "Record") -> int:
        """The number of steps whose record is the reference's."""
        return sum(map(dict.__eq__, self.steps, reference.steps))

    def differences(self, reference: "Record") -> list[str]:
        """What differs, by step and name."""
        return [
            f"step {index + 1}: {name}"
            for index, (one, other) in enumerate(zip(self.steps, reference.steps, strict=True))
            for name in sorted({*one, *other})
            if one.get(name) != other.get(name)
        ]


def run(trainer: lockstep.Trainer, case: Case) -> Record:
    """Trains on the case's batches, from wherever the trainer stands."""
    started = time.perf_counter()
    record = Record(len(trainer.devices))
    for batch in case.batches:
        logs = trainer.step(batch)
        record.steps.append({**trainer.digests(), **_bits({**logs, "grad_norm": logs["grad_norm"]})})
    if case.fit is not None:
        data, batch_size = case.fit
        history = trainer.fit(data, batch_size=batch_size, callbacks=[_Writing(record)], verbose=0)
        record.steps.append(_bits({name: values[-1] for name, values in history.history.items()}))
    for data, inputs in case.forward:
        outputs = hashlib.sha256(trainer.predict(inputs).tobytes()).hexdigest()
        record.steps.append({"outputs": outputs, **_bits(trainer.evaluate(data))})
    record.seconds = time.perf_counter() - started
    return record


class _Writing(lockstep.Callback):
    """Writes down the state after every step of a fit, and the running means."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] = MappingProxyType({})) -> None:
        self._record.steps.append({**self.trainer.digests(), **_bits(logs)})


def compare(
    framework: str, runs: Sequence[tuple[Case, Record]], reference: Sequence[tuple[Case, Record]], matrix: list[Entry]
) -> None:
    """Enters every case into the matrix, then asserts that each step of each has the reference's bits."""
    different = {}
    for (case, record), (same, other) in zip(runs, reference, strict=False):  # fewer shards than devices: not run
        assert (case.name, case.shards) == (same.name, same.shards)
        assert len(record.steps) == len(other.steps) > 0
        equal, total = record.equal(other), len(record.steps)
        name = f"{case.name}, {case.shards} shards"
        known = recorded.check(framework, f"{runs[0][0].name}: {name}", other.steps)
        matrix.append(Entry(framework, case.name, case.shards, record.devices, equal, total, record.seconds, known))
        if equal < total:
            different[name] = record.differences(other)[:5]
        elif known == "other":
            different[name] = ["other bits than tests/parity/recorded.json holds, on any number of devices"]
    assert runs
    assert not different


def _bits(logs: Mapping[str, float]) -> dict[str, str]:
    return {f"logs.{name}": float(value).hex() for name, value in logs.items()}
