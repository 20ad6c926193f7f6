"""A loss is judged by its values: a sum, a mean, or neither."""

import numpy as np
import pytest

from lockstep.core.loss_reduction import Reduction, judge

_generator = np.random.Generator(np.random.PCG64(1))
TARGETS = _generator.standard_normal((9, 4))
OUTPUTS = _generator.standard_normal((9, 4)) * np.arange(1, 10)[:, None]  # no two parts alike


def squares(outputs, targets):
    return (outputs - targets) ** 2


def two_heads(outputs, targets):
    return float(squares(outputs["a"], targets).sum() + outputs["b"][0].sum())


def of_seven(outputs, targets):
    return float(squares(outputs.reshape(9, 4), targets).mean())


@pytest.mark.parametrize(
    ("criterion", "expected"),
    [
        (lambda outputs, targets: squares(outputs, targets).sum(), Reduction.SUM),
        (lambda outputs, targets: squares(outputs, targets).sum() / 64, Reduction.SUM),  # by a number of the script's
        (lambda outputs, targets: -outputs.sum(), Reduction.SUM),  # of both signs
        (lambda outputs, targets: squares(outputs, targets).mean(), Reduction.MEAN),
        (lambda outputs, targets: squares(outputs, targets).sum(1).mean(), Reduction.MEAN),
        (lambda outputs, targets: outputs.mean(), Reduction.MEAN),
        (lambda outputs, targets: squares(outputs, targets).mean() + 1, Reduction.MEAN),
        (lambda outputs, targets: None, Reduction.MEAN),  # one loss per example, or a Sum
        (lambda outputs, targets: squares(outputs, targets).sum() + 20, Reduction.ASSUMED),
        (lambda outputs, targets: squares(outputs, targets).mean() ** 0.5, Reduction.ASSUMED),
        (lambda outputs, targets: squares(outputs, targets)[outputs > 0].mean(), Reduction.ASSUMED),
        (lambda outputs, targets: (outputs @ outputs.T).mean(), Reduction.ASSUMED),  # between examples
        (lambda outputs, targets: 0.0, None),
        (lambda outputs, targets: float("nan"), Reduction.ASSUMED),
        (lambda outputs, targets: float("inf"), Reduction.ASSUMED),
        (lambda outputs, targets: None if len(outputs) > 4 else 1.0, Reduction.MEAN),
        (lambda outputs, targets: None if len(outputs) < 5 else 1.0, Reduction.ASSUMED),
        (of_seven, Reduction.ASSUMED),  # its shape is written down: parts of it raise
    ],
)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_judge(criterion, expected, dtype):
    assert judge(criterion, OUTPUTS.astype(dtype), TARGETS.astype(dtype), 9) is expected


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("columns", [1, 10, 100])
def test_a_function_of_a_mean_is_no_mean_though_the_halves_of_many_examples_are_alike(columns, dtype):
    outputs, targets = (_generator.standard_normal((2, 4096, columns))).astype(dtype)

    def root(outputs, targets):
        return float(squares(outputs, targets).mean() ** 0.5)

    assert judge(root, outputs, targets, 4096) is Reduction.ASSUMED
    assert judge(lambda o, t: float(squares(o, t).mean()), outputs, targets, 4096) is Reduction.MEAN
    assert judge(lambda o, t: float(squares(o, t).sum()), outputs, targets, 4096) is Reduction.SUM


@pytest.mark.parametrize("num_examples", [1, 2, 3, 8])
def test_any_number_of_examples_can_be_judged(num_examples):
    outputs, targets = OUTPUTS[:num_examples], TARGETS[:num_examples]
    assert judge(lambda o, t: squares(o, t).sum(), outputs, targets, num_examples) is Reduction.SUM
    assert judge(lambda o, t: squares(o, t).mean(), outputs, targets, num_examples) is Reduction.MEAN


@pytest.mark.parametrize(
    ("outputs", "targets", "criterion"),
    [
        ({"a": OUTPUTS, "b": (OUTPUTS,)}, TARGETS, two_heads),
        ([OUTPUTS, OUTPUTS], TARGETS, lambda o, t: squares(o[0], t).sum() + o[1].sum()),
        (OUTPUTS, ["a", "bb", "c", "d", "e", "f", "g", "h", "i"], lambda o, t: o.sum() * sum(map(len, t)) / len(t)),
        (OUTPUTS, {"scale": 2.0, "y": TARGETS}, lambda o, t: (squares(o, t["y"]) * t["scale"]).sum()),
    ],
)
def test_nests_are_cut_in_their_arrays(outputs, targets, criterion):
    expected = Reduction.ASSUMED if isinstance(targets, list) else Reduction.SUM
    assert judge(criterion, outputs, targets, 9) is expected


def test_outputs_without_a_row_for_each_example_cannot_be_judged():
    assert judge(lambda o, t: o.sum(), OUTPUTS.T, TARGETS, 9) is Reduction.ASSUMED
