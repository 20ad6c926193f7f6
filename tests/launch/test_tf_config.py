"""TF_CONFIG in the forms that TensorFlow's launchers write."""

import json

import pytest

from lockstep.errors import LaunchError
from lockstep.launch import environment, tf_config

TWO = {"worker": ["a:1", "b:1"]}


def text(cluster, kind="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


@pytest.mark.parametrize(
    ("config", "place"),
    [
        (text(TWO, index=1), (1, 2, 0, 1, "a")),
        (text({"chief": ["c:9"], "worker": ["a:1", "a:2"]}, "chief"), (0, 3, 0, 1, "c")),
        (text({"chief": ["c:9"], "worker": ["a:1", "a:2"]}, "worker", 1), (2, 3, 1, 2, "c")),
        (text({"worker": ["[::1]:5", "[::1]:6"]}, index=1), (1, 2, 1, 2, "[::1]")),
    ],
)
def test_the_place_of_a_process(config, place):
    found = tf_config.parse_place(config)
    assert found[:5] == place
    assert found[5] == tf_config.parse_place(config.replace('"index": 1', '"index": 0'))[5]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "TF_CONFIG must be a JSON object with a cluster of workers and a task"),
        (text({"worker": ["a:1"], "ps": ["b:1"]}), "TF_CONFIG must be a job that has only workers"),
        (text(TWO, "evaluator"), "TF_CONFIG must be a job that has only workers"),
        (text(TWO, index=2), "TF_CONFIG must be a task with an index below the cluster's 2 processes"),
    ],
)
def test_other_configs_are_refused(config, message, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(LaunchError, match=message):
        environment.find_place()


def test_a_job_of_one_process_counts_as_not_launched(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text({"worker": ["a:1"]}))
    assert environment.find_place() is None
