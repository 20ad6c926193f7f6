"""`lockstep.wrap`: choose the backend and the processes, and return a trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep import devices as names
from lockstep.backends import registry
from lockstep.backends.base import Backend, KeepsOutputs, Module, Recipe
from lockstep.core.metric_kinds import Named, split
from lockstep.core.metric_objects import MetricObjects
from lockstep.core.options import Options
from lockstep.core.plan import Plan
from lockstep.errors import LaunchError
from lockstep.launch import environment, malloc
from lockstep.processes import rendezvous
from lockstep.processes.base import Processes
from lockstep.processes.local_workers import LocalWorkers
from lockstep.processes.single_process import SingleProcess
from lockstep.trainer import Model, Trainer
from lockstep.training.call_arguments import explain_arguments
from lockstep.training.run_state import Run
from lockstep.training.session import Session


@explain_arguments
def wrap(
    model: Model,
    optimizer: Any = None,
    loss: Any = None,
    *,
    metrics: str | Sequence[Any] | Mapping[str, Any] = (),
    devices: Any = None,
    shards: int | None = None,
    threads: int | None = None,
    seed: int | None = None,
    precision: str | None = None,
    clip_norm: float | None = None,
    exact: bool = True,
) -> Trainer[Model]:
    """A trainer for the model on every device: the same bits on any number of them.

    `metrics` are a name, or several: names, functions of `(outputs, targets)` and `lockstep.Metric`, which go through
    the shards as sums; and metric objects with a state of their own (torchmetrics', `MetricCollection`, any object with
    `update(outputs, targets)`, `compute()` and `reset()`). Copies of these run in this process alone, on the outputs
    of the whole batch in order, as the framework's arrays on the CPU: `fit` and `evaluate` give their values over the
    epoch or the data, `step` those of its batch. `compute()` gives a number, or several in a dict.

    `devices` is None (every accelerator; one CPU replica where there is none), a
    count, or a list of names or of the framework's own devices. `shards` is the
    fixed number of parts of a batch; with `seed`, and `threads` per shard on a CPU,
    it is part of the experiment, while the number of devices is only a matter of
    speed. Left out, it follows at the first batch: on CPUs the largest power of two
    up to 8 that leaves at least 64 examples per shard, and as many as there are devices
    at least; on accelerators one per device.

    `seed` decides the order of the data and every random number. Left out, it is the
    framework's own: that of `torch.manual_seed` (a torch script that never calls it has
    another seed in each run, as its weights have), `keras.utils.set_random_seed` or
    `tf.random.set_seed`; 0 where there is none. The script's own generators are not
    drawn from. Of processes launched together the first one's seed counts, and a
    checkpoint's on resuming.

    >>> import numpy as np
    >>> from lockstep.backends.numpy import SGD, Dense
    >>> x, y = np.eye(8), np.arange(8) % 2
    >>> trainer = wrap(Dense([8, 2], seed=1), SGD(0.5), "cross_entropy", metrics=["accuracy"], shards=4)
    >>> history = trainer.fit((x, y), epochs=20, batch_size=8, verbose=0)
    >>> trainer.evaluate((x, y))["accuracy"]
    1.0
    """
    chosen = {"seed": seed, "shards": shards, "threads": threads}
    given = frozenset(name for name, value in chosen.items() if value is not None)
    run = Run(0 if seed is None else seed, shards, threads, given=given)  # wrong numbers are refused first
    if isinstance(metrics, str):
        metrics = [metrics]
    framework = registry.name_of(model)
    module = registry.module(framework)
    if seed is None:
        run.seed = module.initial_seed()
    recipe = module.adopt(Recipe(model, optimizer, loss, metrics, Options(precision, clip_norm, exact)))
    objects, others = split(recipe.metrics)
    recipe = replace(recipe, metrics=others, keeps_outputs=bool(objects))
    if rendezvous.is_launched():
        return _join(recipe, run, module, devices, objects)
    resolved = names.resolve(devices, module.available(), module.name)
    if shards is not None:
        Plan.even(shards, len(resolved))  # refuses devices without a shard before anything is started
    groups = module.processes(resolved)
    backend = _open(module, recipe, groups[0])

    def start(wanted: Sequence[str]) -> Processes:
        groups = module.processes(wanted)
        if tuple(groups[0]) != tuple(backend.devices):
            backend.spread(groups[0])
        return SingleProcess(backend) if len(groups) == 1 else LocalWorkers(backend, framework, groups)

    return Trainer(Session(recipe, backend, start, resolved, run, _metric_objects(objects, backend)))


def _join(recipe: Recipe, run: Run, module: Module, devices: Any, objects: Sequence[Named]) -> Trainer[Any]:
    """Return the trainer of a launched process: it has one device, and meets the others over the network."""
    if not module.joins:
        raise LaunchError(
            "This framework drives all devices from one process and meets no others. Got a process that was launched "
            f"among several ({environment.describe_launch() or 'a process group'}). "
            "Start the script with python alone, or unset these."
        )
    device = rendezvous.choose_device(module.available(), devices)
    backend = _open(module, recipe, ["cpu:0" if names.is_cpu(device) else device])  # as this process numbers them
    wire = rendezvous.join(not names.is_cpu(device))

    def start(wanted: Sequence[str]) -> Processes:
        from lockstep.processes.launched import LaunchedProcesses

        return LaunchedProcesses(backend, wire, device)

    return Trainer(Session(recipe, backend, start, (device,), run, _metric_objects(objects, backend)))


def _metric_objects(objects: Sequence[Named], backend: Backend) -> MetricObjects:
    assert not objects or isinstance(backend, KeepsOutputs)
    return MetricObjects(objects, backend.outputs if isinstance(backend, KeepsOutputs) else None)


def _open(module: Module, recipe: Recipe, devices: Sequence[str]) -> Backend:
    for name, value in module.variables(devices).items():
        environment.set_default(name, value)
    if names.is_cpu(devices[0]):
        malloc.keep_freed_memory()
    return module.open(recipe, devices)
