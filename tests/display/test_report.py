"""The report of a run: one file of a bounded size, which loads nothing and executes nothing of the run's own."""

import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from display.sample_report import write_report
from lockstep.callbacks import History
from lockstep.core.attempt import Attempt, Timing
from lockstep.core.plan import Plan
from lockstep.display.report.report import Report

MAX_BYTES = 300_000


class Page(HTMLParser):
    """The elements of a page and its text, script and style apart."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self.raw = [], [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        if self.tags[-1] in ("script", "style"):
            self.raw += data
        else:
            self.text += data


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("report") / "run.html", 10_000, 8)


def values(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1])


def test_the_report_of_a_long_run_is_small_and_has_all_of_it(long):
    assert len(long.encode()) <= MAX_BYTES
    times = values(long)["times"]
    assert sum(times["steps"]) == 10_000
    assert len(times["steps"]) * 8 <= 4096
    assert times["parts"]["compute"][7][0] - times["parts"]["compute"][0][0] == 8000  # microseconds of the slowest
    lost = [step is None for step in times["parts"]["compute"][1]]
    assert abs(sum(lost) / len(lost) - 0.25) < 0.01
    assert set(times["bars"]) == {"compute", "exchange", "update", "waiting for data", "checkpoint", "repeated"}


@pytest.mark.parametrize(("num_steps", "num_devices", "epoch_steps"), [(3000, 3, 1), (200, 256, 10)])
def test_many_epochs_and_many_devices_are_small_too(num_steps, num_devices, epoch_steps, tmp_path):
    names = ("loss", *(f"metric{index}" for index in range(20)))
    text = write_report(tmp_path / "run.html", num_steps, num_devices, epoch_steps, names)
    assert len(text.encode()) <= MAX_BYTES
    assert f"{num_steps // epoch_steps - 1:064x}" in text  # the last epoch is always there


def test_nothing_is_loaded_from_elsewhere(long):
    page = Page(long)
    assert {"link", "iframe", "object", "form", "a"}.isdisjoint(page.tags)
    addresses = [value for name, value in page.attributes if name in ("src", "href", "action", "data", "xlink:href")]
    assert len(addresses) == 4  # the pictures of the heat map
    assert all(address.startswith("data:image/png;base64,") for address in addresses)
    assert re.findall(r"https?:|url\(|@import|fetch\(|import\(", page.raw) == []


def test_what_comes_from_the_run_is_only_text(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'"
    text = write_report(tmp_path / "run.html", 40, 2, 10, ("loss", "a", evil), {"command": evil})
    page = Page(text)
    plain = Page(write_report(tmp_path / "run.html", 40, 2, 10, ("loss", "a", "plain"), {"command": "plain"}))
    assert page.tags == plain.tags
    assert evil in page.text
    assert any(evil in label for label in values(text)["panels"][1][0])
    assert "alert(1)</script>" not in page.raw


def test_what_has_happened_is_said_and_marked(long):
    page = Page(long)
    marks = [value for name, value in page.attributes if name == "title" and "step" in (value or "")]
    assert "cuda:1 was lost (step 2,500, 1:40)" in marks
    assert "cuda:1 has joined (step 5,000, 3:20)" in marks
    assert "cuda:1 (pid 77) was killed by SIGKILL in step 2500" in page.text
    assert "cuda:0: shards 0 to 1" in page.text  # which it computes while cuda:1 is missing
    assert "finished" in page.text


def test_a_run_without_a_step_has_a_report(tmp_path):
    text = write_report(tmp_path / "run.html", 0, 1)
    assert "No step has been made yet." not in text  # the opening line is known
    assert "finished" in text


def test_the_memory_of_a_report_is_bounded(tmp_path):
    report = Report(tmp_path / "run.html", 0.0, "", {})
    for step in range(5000):
        report.add_notice("x" * 1000, 1.0, step)
        report.add_attempt(Attempt(step, Plan((step % 3,) * 4, (step % 3,)), {step % 3: []}), ("a", "b", "c"), 1.0)
    assert len(report.events) <= 200
    assert len(report.plans) <= 13
    assert max(len(event.text) for event in report.events) <= 400


def test_steps_that_are_made_again_after_an_earlier_state_was_restored(tmp_path):
    report = Report(tmp_path / "run.html", 0.0, "", {})
    trainer = SimpleNamespace(history=History(("a",)), opening="1 device", resumed="", model=object())
    for step in (0, 1, 2, 3, 1, 2, 3, 1, 2, 3):
        timings = {0: [Timing("compute", 0.0, 1.0)]}
        report.add_attempt(Attempt(step, Plan((0,), (0,)), timings), ("a",), 1.0)
    report.close(trainer, "finished")
    text = (tmp_path / "run.html").read_text("utf-8")
    assert values(text)["times"]["steps"] == [1, 3, 3, 3]
