"""The benchmarks' arithmetic, with a clock and a load of the test's own: no step is timed here."""

import importlib
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def modules():
    """The benchmarks import each other as the scripts of one folder do."""
    names = ("timing", "load", "page", "peers", "compare", "summary")
    sys.path.insert(0, str(HERE))
    try:
        return {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(HERE))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture
def timing(modules):
    return modules["timing"]


@pytest.fixture
def load(modules):
    return modules["load"]


class Clock:
    """A clock that stands still unless the test moves it."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def pass_time(self, seconds):
        self.now += seconds


@pytest.mark.parametrize(
    "values, percent, expected",
    [
        ([7.0], 95, 7.0),
        (list(range(1, 21)), 95, 19),  # a value of its own in the list, never one in between
        (list(range(1, 22)), 95, 20),
        (list(range(100, 0, -1)), 95, 95),
        ([1, 2, 3, 4], 50, 2),
        ([1, 2, 3, 4], 100, 4),
        ([1, 2, 3, 4], 0, 1),
    ],
)
def test_percentile(timing, values, percent, expected):
    assert timing.percentile(values, percent) == expected


def test_a_percentile_of_nothing_is_refused(timing):
    with pytest.raises(ValueError, match="at least one value"):
        timing.percentile([], 95)


def test_a_stall_shows_in_the_mean_and_the_p95(timing):
    summary = timing.Summary.of([0.001] * 90 + [0.1] * 10)
    assert summary == timing.Summary(100, pytest.approx(10.9), 1.0, 100.0)


def test_steps_are_timed_one_by_one(timing):
    clock = Clock()
    lengths = iter([9.0, 9.0, 1.0, 2.0, 3.0])  # two that are not counted
    finished = []

    def finish():
        finished.append(clock.now)
        clock.pass_time(0.5)

    seconds = timing.time_steps(lambda: clock.pass_time(next(lengths)), finish, warm=2, count=3, clock=clock)
    assert seconds == [1.0, 2.0, 3.5]  # what was still under way at the end is in the last step
    assert finished == [118.0, 124.5]  # and what was under way before is in none


def test_the_step_clock_of_a_fit(timing):
    clock = Clock()
    steps = timing.StepClock(clock)
    for length in (50.0, 1.0, 2.0):
        clock.pass_time(length)
        steps.mark()
    clock.pass_time(40.0)
    steps.restart()  # an epoch that ends is not charged
    for length in (30.0, 3.0):
        clock.pass_time(length)
        steps.mark()
    clock.pass_time(0.25)
    steps.close()
    assert steps.take(2) == [2.0, 3.25]
    assert steps.seconds == []


def test_contenders_take_turns_in_both_orders(timing):
    turns = []

    class Fixed:
        def __init__(self, name, seconds, least_warm=0):
            self.name, self.seconds, self.least_warm = name, seconds, least_warm

        def take_turn(self, warm, count):
            turns.append((self.name, warm, count))
            return [self.seconds] * count

    contenders = {"a": Fixed("a", 0.01), "b": Fixed("b", 2.0, least_warm=1)}
    result = timing.interleave(contenders, rounds=3, turn_seconds=0.5)
    first = [("a", 0, 1), ("a", 1, 5), ("b", 1, 1)]  # how long a step takes
    a, b = ("a", 5, 50), ("b", 1, 1)
    assert turns == [*first, a, b, b, a, a, b]
    assert [len(turn) for turn in result["a"]] == [50] * 3
    assert result["b"] == [[2.0]] * 3


STAT = "cpu  {user} 0 0 {idle} 0 0 0 {steal} 0 0"


@pytest.mark.parametrize(
    "user, idle, steal, average, quiet, in_use",
    [
        (0, 200, 0, 0.0, True, False),
        (8, 192, 0, 0.5, True, False),
        (20, 180, 0, 0.0, False, True),  # 10 % of the cores
        (0, 180, 20, 0.0, False, True),  # taken by other guests of the host
        (0, 200, 0, 1.5, False, False),  # only the past was busy
    ],
)
def test_a_busy_machine_is_detected(load, user, idle, steal, average, quiet, in_use):
    texts = iter(
        [STAT.format(user=1000, idle=1000, steal=0), STAT.format(user=1000 + user, idle=1000 + idle, steal=steal)]
    )
    slept = []
    found = load.measure_load(1.0, lambda: load.parse_cpu_times(next(texts)), slept.append, lambda: average)
    found = load.Load(found.percent, found.average, cores=2)
    assert slept == [1.0]
    assert found.percent == pytest.approx((user + steal) / 2)
    assert (found.is_quiet, found.in_use) == (quiet, in_use)


def test_a_load_average_gets_time_to_fall(load):
    averages = iter([2.0, 1.0, 0.6, 0.4, 0.1])
    slept = []
    found = load.wait_until_quiet(lambda: load.Load(0.0, next(averages), 2), slept.append)
    assert found.average == 0.4
    assert slept == [5.0] * 3


def test_cores_in_use_are_looked_at_three_times(load):
    slept = []
    found = load.wait_until_quiet(lambda: load.Load(50.0, 2.0, 2), slept.append)
    assert not found.is_quiet
    assert slept == [5.0] * 2


def test_one_busy_second_passes(load):
    loads = iter([load.Load(50.0, 2.0, 2), load.Load(0.0, 0.4, 2)])
    assert load.wait_until_quiet(lambda: next(loads), lambda _: None).is_quiet


def test_other_processes_exclude_our_own(load):
    times, own = iter([load.CpuTimes(0, 0), load.CpuTimes(100, 60)]), iter([0.0, 50.0])
    others = load.OthersUse(lambda: next(times), lambda: next(own))
    assert others.percent() == pytest.approx(10.0)


def test_every_row_is_printed_and_compared_with_the_faster_plain_one(modules):
    compare = modules["compare"]
    framework = compare.Framework(
        "x", "X", "x.py", "DDP", (), {"net": "Net"}, {"net": 64}, lambda name: [], ("net",), 2
    )
    steps = {"plain": [[0.02], [0.02]], "plain, 1 thread": [[0.01]], "DDP": [[0.04]], "ours": [[0.05, 0.03]]}
    roles = {"plain": "plain", "plain, 1 thread": "plain", "DDP": "own", "ours": "lockstep"}
    rows = [
        line.split("|")[1:-1] for line in compare.section(framework, "net", steps, roles).splitlines() if "|" in line
    ]
    assert [[cell.strip() for cell in row] for row in rows[2:]] == [
        ["plain", "20.00", "20.00", "20.00", "3,200", "0.50", "2.00"],
        ["plain, 1 thread", "10.00", "10.00", "10.00", "6,400", "1.00", "4.00"],
        ["DDP", "40.00", "40.00", "40.00", "1,600", "0.25", "1.00"],
        ["ours", "40.00", "40.00", "50.00", "1,600", "0.25", "1.00"],
    ]


ONE_OR_TWO = ["1 device, 1 shard", "2 devices, 2 shards"]


@pytest.mark.parametrize(
    "batch_size, labels",
    [
        (256, ["default arguments (4 shards)", *ONE_OR_TWO, "2 devices, 4 shards (the default)"]),
        (64, ["default arguments (1 shard)", "2 devices, 2 shards (the default)"]),  # equal ones once
    ],
)
def test_the_default_arguments_always_have_a_row(modules, batch_size, labels):
    entries = modules["compare"].lockstep_entries("net", batch_size)
    assert [entry.label for entry in entries] == [f"Lockstep, {label}" for label in labels]
    assert entries[0].arguments[0][:4] == ["--serve", "lockstep", "net", "--expect"]  # and no argument of wrap's


@pytest.mark.parametrize(
    "before, idle, others, written",
    [((0.0, 0.1), 0.0, 0.0, True), ((40.0, 0.1), 0.0, 0.0, False), ((0.0, 3.0), 0.0, 0.0, False),
     ((0.0, 0.1), 30.0, 0.0, False), ((0.0, 0.1), 0.0, 20.0, False)],
)  # fmt: skip
def test_no_page_of_a_busy_machine(modules, monkeypatch, capsys, before, idle, others, written):
    compare, load = modules["compare"], modules["load"]
    framework = compare.Framework(
        "x", "X", "x.py", "DDP", (), {"net": "Net"}, {"net": 64}, lambda name: [], ("net",), 2
    )
    pages = []
    monkeypatch.setattr(sys, "argv", ["x.py", "--page"])
    monkeypatch.setattr(compare.os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(compare.os, "environ", {})
    monkeypatch.setattr(load, "wait_until_quiet", lambda: load.Load(*before, cores=2))
    monkeypatch.setattr(load.OthersUse, "percent", lambda self: others)
    monkeypatch.setattr(compare, "measure", lambda *_: ("the table", load.Load(idle, 0.0, 2)))
    monkeypatch.setattr(compare.page, "write", lambda *arguments: pages.append(arguments) or "page.md")
    compare.main(framework)
    printed = capsys.readouterr().out
    assert "the table" in printed  # in any case
    assert len(pages) == written
    assert ("No page is written, because this machine is busy" in printed) != written


@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow", "mxnet"])
def test_the_tables_of_the_speed_page_are_those_of_the_newest_pages(modules, framework):
    table = modules["summary"].summarize(framework)
    assert len(table.splitlines()) > 3
    assert table in (HERE.parent / "docs/speed.md").read_text(encoding="utf-8")


def test_the_readme_has_the_means_of_all(modules):
    table = modules["summary"].summarize_all()
    assert len(table.splitlines()) > 10
    assert table in (HERE.parent / "README.md").read_text(encoding="utf-8")


def test_a_summary_takes_the_faster_plain_loop_and_the_defaults(modules):
    labels = {
        "plain loop": ("2.00", "1.90", "2.50"),
        "plain loop, 1 thread": ("1.50", "1.40", "1.60"),
        "DDP": ("4.00", "4.00", "4.00"),
        "Lockstep, default arguments (1 device, 4 shards), `step`": ("9.00", "9.00", "9.00"),
        "Lockstep, default arguments (1 device, 4 shards), `fit`": ("8.00", "8.00", "8.00"),
        "Lockstep, 2 devices, 2 shards, `fit`": ("1.00", "1.00", "1.00"),
        "Lockstep, 2 devices, 4 shards (the default), `step`": ("7.00", "7.00", "7.00"),
        "Lockstep, 2 devices, 4 shards (the default), `fit`": ("1,006.00", "6.00", "6.00"),
    }
    assert [cell.split(" · ")[0] for cell in modules["summary"].contenders(labels)] == [
        "1.50", "4.00", "8.00", "1,006.00", "9.00", "7.00"
    ]  # fmt: skip
