"""A report of a run of any length, without the run: its times follow from the numbers of step and device."""

from types import SimpleNamespace

from lockstep.callbacks import History
from lockstep.core.attempt import Attempt, Timing
from lockstep.core.plan import Plan
from lockstep.display.report.report import Report

STEP_SECONDS = 0.04


def write_report(path, num_steps, num_devices, epoch_steps=100, names=("loss", "accuracy"), facts=None):
    """Writes the report of a run that loses a device after a quarter of its steps, and gets it back after a half."""
    devices = tuple(f"cuda:{index}" for index in range(num_devices))
    trainer = SimpleNamespace(history=History(devices), opening=f"{num_devices} devices", resumed="", model=object())
    report = Report(path, 0.0, "2026-01-31 12:00:00", facts or {"command": "python train.py"})
    everyone = Plan.even(num_devices, range(num_devices))
    others = Plan.even(num_devices, [0, *range(2, num_devices)]) if num_devices > 1 else everyone
    now = 0.0
    for step in range(num_steps):
        plan = others if num_steps // 4 <= step < num_steps // 2 else everyone
        if step == num_steps // 4 and num_devices > 1:
            report.add_attempt(
                Attempt(step, everyone, measure(everyone, step, now), False, {1: 1}), devices, now + 0.05
            )
            report.add_notice(f"{devices[1]} (pid 77) was killed by SIGKILL in step {step}", now + 0.05, step)
            now += 0.05
        report.add_pause("input", now, now + 0.001, step)
        report.add_attempt(Attempt(step, plan, measure(plan, step, now), True), devices, now + STEP_SECONDS)
        now += STEP_SECONDS
        if step % epoch_steps == epoch_steps - 1:
            epoch = step // epoch_steps
            report.add_pause("checkpoint", now, now + 0.02, step + 1)
            keys = [key for name in names for key in (name, f"val_{name}")]
            values = {key: 1 / (2 + epoch % 10 + index % 5) for index, key in enumerate(keys)}
            trainer.history.record(epoch, values, 4.0)
            report.add_epoch(epoch, f"{epoch:064x}")
    report.close(trainer, "finished")
    return path.read_text("utf-8")


def measure(plan, step, now):
    """The timings of every device, of which the last is the slowest."""
    timings = {}
    for replica in plan.replicas:
        computed = now + 0.02 + 0.001 * (step % 7) + 0.008 * (replica == max(plan.replicas))
        timings[replica] = [
            Timing("compute", now, computed),
            Timing("exchange", computed, now + 0.037),
            Timing("update", now + 0.037, now + 0.039),
        ]
    return timings
