"""`lockstep.wrap`: chooses the backend and the processes for a model, and returns a trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep import devices as names
from lockstep.backends import registry
from lockstep.backends.base import Backend, KeepsOutputs, Module, Recipe
from lockstep.checkpoint.autosave import print_notice
from lockstep.core.lateness import Deadline
from lockstep.core.metric_kinds import Named, split
from lockstep.core.metric_objects import MetricObjects
from lockstep.core.options import Options
from lockstep.core.plan import Plan
from lockstep.core.run_state import Run
from lockstep.errors import DeviceError, LaunchError, ModelError, PlanError
from lockstep.launch import environment, malloc
from lockstep.launch.host import read_host
from lockstep.processes import rendezvous
from lockstep.processes.base import Processes
from lockstep.processes.local_workers import LocalWorkers
from lockstep.processes.seats import can_start_workers
from lockstep.processes.single_process import SingleProcess
from lockstep.trainer import Model, Trainer
from lockstep.training.call_arguments import explain_arguments
from lockstep.training.session import Session
from lockstep.training.session_processes import GrowthPlan, ProcessStarter


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
    compile: bool = False,
) -> Trainer[Model]:
    """Returns a trainer, which trains the model on several devices, with the same bits on any number of devices.

    Args:
        model: the framework's own model. The trainer trains this object itself, so the script can use it at any time.
        optimizer: the framework's own optimizer; None for a Keras model, which was compiled with an optimizer.
        loss: a loss of `(outputs, targets)`, its name, or a `lockstep.objective`. None uses the model's own `.loss`,
            or the loss with which a Keras model was compiled.
        metrics: a metric, a list of metrics, or a dict of metrics by name. A metric is a name such as "accuracy", a
            function of `(outputs, targets)`, a `lockstep.Metric`, or a metric object: any object with
            `update(outputs, targets)`, `compute()` and `reset()`, such as a metric of torchmetrics. Copies of a metric
            object are updated in this process, with the outputs and targets of the whole batch on the CPU; its
            `compute()` returns a number, or a dict of numbers by name.
        devices: the number of devices, or a list of their names or of the framework's own device objects. None uses
            every accelerator; without one it starts with one replica on the CPU, and more join while it trains if the
            host has cores and memory for them. It only changes the speed.
        shards: the fixed number of parts into which every batch is split; it is part of the result. If left out, it is
            chosen at the first batch: on accelerators one shard per device; on CPUs the largest power of two up to 8
            that leaves at least 64 examples per shard, but at least the number of devices.
        threads: the number of threads that compute a shard on a CPU; it is part of the result. If left out, it is the
            framework's number of threads divided by the number of shards, but at least 1.
        seed: determines the order of the data and all random numbers of the training. If left out, it is the
            framework's own: that of `torch.manual_seed` (a script that never calls it has a different seed in each
            run), `keras.utils.set_random_seed` or `tf.random.set_seed`, or else 0. Processes that were launched
            together use the seed of the first, and a resumed run uses the seed in its checkpoint. The script's own
            random number generators are not used.
        precision: "bf16" or "fp16" for mixed precision; None computes in the model's own types.
        clip_norm: scales the gradient of every step so that its norm is at most this number; None does not clip it.
        exact: False gives up bit-identical results, so that features which cannot guarantee them can be used.
        compile: True compiles a shard's training pass with torch.compile, in every process by itself. Measure whether
            it makes the steps of your model faster; it is part of the result. For PyTorch on CPUs (docs/speed.md);
            other frameworks refuse it, because JAX and TensorFlow compile without being asked.

    Raises a `lockstep.LockstepError` if an argument is invalid, the model, loss or a metric is not supported, or a
    process that was launched together with others cannot join them.

    PyTorch:

    >>> import torch
    >>> net = torch.nn.Linear(8, 2)
    >>> sgd = torch.optim.SGD(net.parameters(), lr=0.5)
    >>> trainer = wrap(net, sgd, torch.nn.CrossEntropyLoss(), metrics=["accuracy"], shards=4)
    >>> x, y = torch.eye(8), torch.arange(8) % 2
    >>> history = trainer.fit((x, y), epochs=20, batch_size=8, verbose=0)
    >>> trainer.evaluate((x, y))["accuracy"]
    1.0

    Keras: `lockstep.wrap(keras_model)` with a compiled model, on any of Keras's backends. JAX:
    `lockstep.wrap(module, optax.adam(1e-3), loss)` with a module of flax, or `(apply, variables)` in its place.
    """
    chosen = {"seed": seed, "shards": shards, "threads": threads}
    given = frozenset(name for name, value in chosen.items() if value is not None)
    run = Run(0 if seed is None else seed, shards, threads, given=given)  # raises for invalid numbers
    if isinstance(metrics, str):
        metrics = [metrics]
    framework = registry.find_backend(model)
    module = registry.load_module(framework)
    options = Options(precision, clip_norm, exact, compile)
    if options.compile and not module.compiles:
        raise ModelError(
            f"compile=True is for models of torch.nn. Got a model of class {type(model).__name__}. JAX and TensorFlow "
            "compile every step without it, an MXNet block does after net.hybridize(), and a Keras model on PyTorch is "
            "not compiled. Leave compile out."
        )
    if seed is None:
        run.seed = module.initial_seed()
    recipe = module.adopt(Recipe(model, optimizer, loss, metrics, options))
    objects, others = split(recipe.metrics)
    recipe = replace(recipe, metrics=others, keeps_outputs=bool(objects))
    if rendezvous.is_launched():
        return _join(recipe, run, module, devices, objects)
    asked = environment.read_devices() if devices is None else devices
    try:
        resolved = names.resolve(asked, module.available(), module.name)
        if shards is not None:
            Plan.even(shards, range(len(resolved)))  # refuses devices without a shard before anything is started
    except (DeviceError, PlanError) as error:
        if asked is devices:
            raise
        text = ",".join(asked) if isinstance(asked, list) else asked
        raise type(error)(
            f"LOCKSTEP_DEVICES={text} is used as devices={asked!r}. {error} Change LOCKSTEP_DEVICES, or unset it to "
            "use the default."
        ) from None
    groups = module.processes(resolved)
    backend = _open(module, recipe, groups[0])

    def start(devices: Sequence[str], later: Sequence[str] = (), spare: Sequence[str] = ()) -> Processes:
        groups = module.processes([*devices, *later, *spare])
        if tuple(groups[0]) != tuple(backend.devices):
            backend.spread(groups[0])
        if len(groups) == 1:
            return SingleProcess(backend)
        open_deadline = Deadline.for_compiling if options.compile else Deadline
        deadline = open_deadline(environment.read_worker_timeout())
        return LocalWorkers(backend, framework, devices, later, spare, print_notice, deadline)

    growth = (
        GrowthPlan(read_host, print_notice)
        if asked is None and names.is_cpu(resolved[0]) and can_start_workers(backend)
        else None
    )
    starter = ProcessStarter(start, lambda devices: names.resolve(devices, module.available(), module.name))
    return Trainer(Session(recipe, backend, starter, resolved, run, _create_metric_objects(objects, backend), growth))


def _join(recipe: Recipe, run: Run, module: Module, devices: Any, objects: Sequence[Named]) -> Trainer[Any]:
    """Returns the trainer of a launched process, which uses one device and joins the process group of its launch."""
    if not module.joins:
        raise LaunchError(
            f"This process was launched as one of several ({environment.describe_launch() or 'a process group'}), but "
            "this framework uses all devices from one process and cannot join other processes. Start the script with "
            "python alone, or unset the variables of the launcher."
        )
    device = rendezvous.choose_device(module.available(), devices)
    backend = _open(module, recipe, ["cpu:0" if names.is_cpu(device) else device])  # a process has only one CPU device
    wire = rendezvous.join(not names.is_cpu(device), print_notice)

    def start(devices: Sequence[str], later: Sequence[str] = (), spare: Sequence[str] = ()) -> Processes:
        from lockstep.processes.launched import LaunchedProcesses

        return LaunchedProcesses(backend, wire, device)

    starter = ProcessStarter(start, lambda devices: names.resolve(devices, module.available(), module.name))
    return Trainer(Session(recipe, backend, starter, (device,), run, _create_metric_objects(objects, backend)))


def _create_metric_objects(objects: Sequence[Named], backend: Backend) -> MetricObjects:
    assert not objects or isinstance(backend, KeepsOutputs)
    return MetricObjects(objects, backend.outputs if isinstance(backend, KeepsOutputs) else None)


def _open(module: Module, recipe: Recipe, devices: Sequence[str]) -> Backend:
    for name, value in module.variables(devices).items():
        environment.set_default(name, value)
    if names.is_cpu(devices[0]):
        malloc.keep_freed_memory()
    return module.open(recipe, devices)
