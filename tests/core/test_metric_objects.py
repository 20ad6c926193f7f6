"""Metric objects: which they are, what they get, and their state in a checkpoint."""

import re
import weakref
from collections import Counter, OrderedDict, deque
from contextlib import nullcontext

import numpy as np
import pytest

from lockstep.core import object_state, outputs
from lockstep.core.metric_kinds import is_metric_object, merge, split
from lockstep.core.metric_objects import MetricObjects
from lockstep.core.metrics import Metric
from lockstep.core.outputs import CollectedOutputs, Outputs, ShardOutputs, join_shards
from lockstep.core.types import Work
from lockstep.errors import BatchError, ModelError, StateError
from metric_object_samples import Auroc, MacroF1


class Sum:
    """A sum of outputs, and whatever `made` gives beside it."""

    def __init__(self, result=float):
        self.total, self.result = 0.0, result

    def update(self, outputs, targets):
        self.total += outputs.sum()

    def compute(self):
        return self.result(self.total)

    def reset(self):
        self.total = 0.0


class WithoutReset:
    def update(self, outputs, targets):
        pass

    def compute(self):
        return 0.0


class Indexed(Sum):
    def update(self, outputs, targets, indexes):
        pass


class Weighed(Sum):
    def update(self, value, weight=1.0):
        pass


class Named(Sum):
    def update(self, *, logits, labels):
        pass


class OfKeras:
    def update_state(self, y_true, y_pred):
        pass

    def result(self):
        return 0.0

    def reset_state(self):
        pass

    def __call__(self, y_true, y_pred):
        return 0.0


class Function:
    def __call__(self, outputs, targets):
        return 0.0


def passes(*metrics, names=None):
    """A pass of these objects, over numpy's arrays."""
    given = dict(zip(names, metrics, strict=True)) if names else list(metrics)
    return MetricObjects(split(given)[0], ShardOutputs(True, np.asarray)).start()


def batch(*values):
    return {shard: Outputs(np.array(each, float), np.zeros(len(each))) for shard, each in enumerate(values)}


@pytest.fixture
def nothing():
    """No threads or switches to set."""
    return nullcontext


@pytest.mark.parametrize(
    ("metric", "expected"),
    [(Auroc(), True), (len, False), (Function(), False), (Function, False), ("mse", False), (Metric(len), False)],
)
def test_which_are_metric_objects(metric, expected):
    assert is_metric_object(metric) is expected


def test_split_keeps_the_form_and_the_names():
    auroc, f1 = Auroc(), MacroF1(2)
    assert split(["mse", auroc, len]) == ([("Auroc", False, auroc)], ["mse", len])
    assert split({"a": "mse", "b": f1}) == ([("b", True, f1)], {"a": "mse"})
    assert split(auroc) == ([("Auroc", False, auroc)], [])  # without a list, as people write it
    assert split(("mse",)) == ([], ("mse",))


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (
            [WithoutReset()],
            "The metric object WithoutReset has update and compute, but not reset. A metric object needs "
            "update(outputs, targets), compute() and reset(). Add reset, or give a function of (outputs, targets) or a "
            "lockstep.Metric.",
        ),
        ([Auroc], "metrics contains the class Auroc, not an instance of it. Write Auroc(...)."),
        (
            [OfKeras()],
            "OfKeras of keras.metrics can only be used with a Keras model, and this model is not one. Give an object ",
        ),
        (
            [Indexed()],
            (
                "The metric 'Indexed' has update(outputs, targets, indexes), which does not take (outputs, targets). "
                "Wrap the metric in an object with update(outputs, targets)"
            ),
        ),
        (
            [Weighed()],
            "The metric 'Weighed' has update(value, weight=1.0), which does not take (outputs, targets). ",
        ),
        (
            {"a": Named()},
            "The metric 'a' has update(*, logits, labels), which does not take (outputs, targets). Wrap the metric",
        ),
        (
            [Auroc(), Auroc()],
            (
                "Metric names must be unique, and none may be 'loss'. Got ['Auroc', 'Auroc']. Rename a metric with "
                "metrics={'name': metric"
            ),
        ),
        (
            {"loss": Auroc()},
            "Metric names must be unique, and none may be 'loss'. Got ['loss']. Rename a metric with metrics={'name'",
        ),
        (
            ["Auroc", Auroc()],
            "Metric names must be unique, and none may be 'loss'. Got ['Auroc', 'Auroc']. Rename a metric with",
        ),
    ],
)
def test_metrics_that_are_refused(metrics, message):
    with pytest.raises(ModelError, match=re.escape(message)):
        split(metrics)


def test_two_values_of_one_name_are_refused():
    with pytest.raises(ModelError, match="another metric both have the name accuracy"):
        merge({"loss": 1.0, "accuracy": 0.5}, {"accuracy": 0.5})


def test_the_script_s_object_stays_as_it_is_and_passes_do_not_meet(nothing):
    mine = Sum()
    mine.total = 5.0  # it was used before
    objects = MetricObjects(split([mine])[0], ShardOutputs(True, np.asarray))
    one, other = objects.start(), objects.start()
    one.update(batch([1, 2], [3]), nothing)
    other.update(batch([10]), nothing)
    step = objects.compute_later(batch([100]), nothing)
    one.update(batch([4]), nothing)
    assert (one.values(), other.values(), step()) == ({"Sum": 10.0}, {"Sum": 10.0}, {"Sum": 100.0})
    one.reset()
    one.update(batch([7]), nothing)
    assert one.values() == {"Sum": 7.0}
    assert mine.total == 5.0


def test_shards_are_joined_in_order_also_in_nests():
    shards = {
        10: Outputs({"a": np.full(1, 3.0)}, np.array([3])),
        2: Outputs({"a": np.array([1.0, 2.0])}, np.array([1, 2])),
    }
    found, targets = join_shards(shards)
    assert found["a"].tolist() == [1.0, 2.0, 3.0]
    assert targets.tolist() == [1, 2, 3]


def test_names_of_several_values(nothing):
    metric = Sum(lambda total: {"a": total, "b": {"c": np.float32(2)}})
    given, own = passes(metric, names=["own"]), passes(metric)
    for each in (given, own):
        each.update(batch([1.0]), nothing)
    assert given.values() == {"own_a": 1.0, "own_b_c": 2.0}
    assert own.values() == {"a": 1.0, "b_c": 2.0}


@pytest.mark.parametrize(
    ("result", "what"),
    [
        (lambda total: np.zeros((3, 3)), r"an array of shape \(3, 3\)"),
        (lambda total: {"a": np.zeros(2)}, r"an array of shape \(2,\)"),
        (lambda total: (1.0, 2.0), r"\(float, float\)"),
        (lambda total: None, "NoneType"),
        (lambda total: np.array(1j), "an array of complex128"),
    ],
)
def test_a_value_that_is_no_number_is_refused_at_the_first_batch(result, what, nothing):
    with pytest.raises(ModelError, match=rf"compute\(\) of metric '(Sum|a)' returned {what}, not one number"):
        passes(Sum(result)).update(batch([1.0]), nothing)


def test_a_metric_without_a_value_yet_is_no_error_at_the_first_batch(nothing):
    def later(total):
        if total < 2:
            raise ValueError("needs two")
        return total

    one = passes(Sum(later))
    one.update(batch([1.0]), nothing)
    with pytest.raises(ValueError, match="needs two"):
        one.values()
    one.update(batch([1.0]), nothing)
    assert one.values() == {"Sum": 2.0}


def test_reading_a_value_does_not_change_the_state(nothing):
    class Lowest(Sum):
        """Like torchmetrics' MinMaxMetric, whose compute() changes the state."""

        def compute(self):
            self.total -= 1
            return self.total

    one = passes(Lowest())
    for _ in range(3):
        one.update(batch([2.0]), nothing)
        one.values()
    assert one.values() == {"Lowest": 5.0}


def test_an_error_of_update_names_the_metric_and_the_batch(nothing):
    class Particular(Sum):
        def update(self, outputs, targets):
            raise self.error

    for error, kind, words in [
        (TypeError("wants indexes"), ModelError, "^update.* of 'Particular' with .* raised TypeError: wants"),
        (ValueError("wrong shape"), ValueError, "wrong shape"),
    ]:
        metric = Particular()
        metric.error = error
        with pytest.raises(kind, match=words) as caught:
            passes(metric).update(batch([1.0]), nothing)
        assert kind is ModelError or "of 'Particular' with ndarray(1,)" in caught.value.__notes__[0]


def test_an_object_that_cannot_be_copied_or_reset():
    class Held(Sum):
        def __deepcopy__(self, memo):
            raise TypeError("it holds a lock")

    class Tracker(Sum):
        def reset(self):
            raise KeyError("0")

    with pytest.raises(ModelError, match=r"'Held' cannot be copied: it holds a lock\. .* Define __deepcopy__"):
        passes(Held())
    with pytest.raises(
        ModelError, match=r"reset\(\) of metric 'Tracker', called .*, raised KeyError: '0'\. Give the metric object"
    ):
        passes(Tracker())


# -- outputs gathered from the shards


def work(num_examples):
    return Work({}, num_examples, 2, 1, 0, 0)


def test_outputs_of_a_failed_step_are_dropped():
    kept = ShardOutputs(True, np.asarray)
    first, again = work(4), work(4)
    kept.keep(first, 0, Outputs(np.ones(2), np.ones(2)), 2)
    kept.keep(again, 1, Outputs([np.zeros(2)], np.zeros(2)), 2)
    found = kept.read()
    assert list(found) == [1]
    assert found[1].outputs[0].tolist() == [0, 0]


def test_a_batch_is_not_kept_with_its_outputs():
    kept, one = ShardOutputs(True, np.asarray), work(4)
    reference = weakref.ref(one)
    kept.keep(one, 0, Outputs(np.ones(2), np.ones(2)), 2)
    del one
    assert reference() is None
    assert list(kept.read()) == [0]


def test_a_shard_without_metric_objects_or_state_has_nothing():
    kept, one = ShardOutputs(False, np.asarray), work(4)
    kept.keep(one, 0, Outputs(), 1)
    assert kept.read() == {0: Outputs()}
    assert CollectedOutputs(kept.read(), 1).uncarried == [0]


@pytest.mark.parametrize("first", [0, 1])
def test_state_in_some_shards_only_is_refused_in_any_order(first):
    kept, one = ShardOutputs(False, np.asarray), work(4)
    found = [Outputs(carried=np.ones(2)), Outputs()]
    kept.keep(one, first, found[first], 2)
    with pytest.raises(ModelError, match=r"returned no state for shard 1, but lockstep\.Carried for another"):
        kept.keep(one, 1 - first, found[1 - first], 2)


def test_a_loss_without_outputs_is_refused():
    with pytest.raises(ModelError, match=r"but this loss is an objective of \(model, batch\).* Use a loss of \(o"):
        ShardOutputs(True, np.asarray).keep(work(1), 0, Outputs(), 1)


def test_outputs_too_large_to_gather():
    rows = np.broadcast_to(np.float64(0), (2, outputs.LIMIT // 32))  # a shard of half the limit
    kept = ShardOutputs(True, np.asarray)
    kept.keep(work(3), 0, Outputs(rows, np.zeros(2, "int8")), 2)
    with pytest.raises(
        BatchError, match=r"of this batch of 4 examples have 264 MiB .* at most 256 MiB per batch\. .*lockstep.Met"
    ):
        kept.keep(work(4), 0, Outputs(rows, np.zeros((2, 2**18))), 2)


def test_carried_state_of_a_lost_worker_is_refused():
    found = CollectedOutputs({0: Outputs(carried=np.ones(2)), 2: Outputs(carried=np.ones(2))}, 4)
    assert found.lost == [1, 3]
    with pytest.raises(StateError, match=r"lacks shard 1, 3: a worker ended .* Restore the last checkpoint, or start"):
        found.join_carried()


def test_carried_states_that_cannot_be_joined():
    found = CollectedOutputs({0: Outputs(carried=np.ones((2, 3))), 1: Outputs(carried=np.ones((2, 4)))}, 2)
    message = r"cannot be concatenated: .* They are ndarray\(2, 3\) and ndarray\(2, 4\)\. Return the same structure"
    with pytest.raises(ModelError, match=message):
        found.join_carried()


def test_outputs_that_cannot_be_joined():
    message = "cannot be concatenated .*: .*Return arrays with one row per example, .* or use a lockstep.Metric"
    with pytest.raises(ModelError, match=message):
        join_shards({0: Outputs(np.zeros((2, 3)), np.zeros(2)), 1: Outputs(np.zeros((2, 4)), np.zeros(2))})
    with pytest.raises(ModelError, match=message):
        join_shards({0: Outputs(np.zeros(2), ["a", "b"])})


# -- a state in a checkpoint


class Rich:
    """Attributes of every kind that can be saved."""

    def __init__(self):
        self.rows = []
        self.table = {}
        self.function = np.mean
        self.inner = MacroF1(2)
        self.ordered = OrderedDict()
        self.names = set()
        self.recent = deque()
        self.pair = (0, None)
        self.number = np.float32(0)
        self.local = lambda: 1
        self.counts = Counter()
        self.again = self.rows


def used():
    rich = Rich()
    rich.rows += [np.arange(3), np.float64(2.5)]
    rich.table[3] = {"deep": [True, None, b"bytes"]}
    rich.inner.counts += 4
    rich.ordered["x"] = 1
    rich.names |= {"a", "b"}
    rich.recent.extend([1, 2])
    rich.pair = (1, np.ones((2, 2), "float32"))
    rich.number = np.float32(7)
    rich.counts["k"] = 2
    return rich


def test_a_state_comes_back_with_what_is_shared():
    rich, fresh = used(), Rich()
    local = fresh.local
    object_state.load(fresh, object_state.save(rich, Rich(), np.asarray, "rich"), np.array, "rich")
    assert repr(vars(fresh.inner)) == repr(vars(rich.inner))
    for name in ("rows", "table", "ordered", "names", "recent", "pair", "number", "counts"):
        assert repr(getattr(fresh, name)) == repr(getattr(rich, name))
        assert type(getattr(fresh, name)) is type(getattr(rich, name))
    assert fresh.again is fresh.rows
    assert fresh.local is local
    fresh.inner.update(np.eye(2), np.arange(2))  # and it goes on
    assert fresh.inner.counts[0, 0] == 5


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (np.random.default_rng(0), "Generator at rich.extra"),
        ([object()], r"object at rich.extra\[0\]"),
        ({(1, 2): 3}, r"tuple at rich.extra\[\(1, 2\)\]"),
        (np.array([object()]), "ndarray at rich.extra"),
        ([MacroF1(2)], r"MacroF1 at rich.extra\[0\]"),  # an object that a fresh copy does not have
    ],
)
def test_a_state_that_a_checkpoint_cannot_store_is_refused(value, where):
    rich = Rich()
    rich.extra = value
    with pytest.raises(
        StateError, match=f"A checkpoint cannot store the {where} of a metric object.*or train without a checkpoint"
    ):
        object_state.save(rich, Rich(), np.asarray, "rich")


@pytest.mark.parametrize("nest", [None, {"kind": "object", "number": 0}, {"same": 3}, {"kind": "exec", "number": 0}])
def test_an_invalid_state_is_refused(nest):
    nest = {"kind": "object", "number": 9, "content": [["rows", nest or {"keep": True, "x": 1}], 3]}
    with pytest.raises(StateError, match="The checkpoint does not fit the metric object 'rich'"):
        object_state.load(Rich(), nest, np.array, "rich")


def test_the_state_of_other_objects_is_refused(nothing):
    one = passes(Auroc(), names=["auroc"])
    one.update({0: Outputs(np.eye(2), np.array([0, 1]))}, nothing)
    other = passes(Auroc(), names=["other"])
    with pytest.raises(StateError, match=r"with the metric objects \['auroc'\], and this run has \['other'"):
        other.load_state(one.state(), True, nothing)
    with pytest.raises(StateError, match="metric objects none"):
        other.load_state(None, True, nothing)
    other.load_state(None, False, nothing)
    again = passes(Auroc(), names=["auroc"])
    again.load_state(one.state(), True, nothing)
    again.update({0: Outputs(np.eye(2), np.array([1, 0]))}, nothing)
    assert again.values() == {"auroc": 0.5}
