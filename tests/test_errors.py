"""The tree of exceptions is the one that is drawn."""

import builtins
import inspect
import pickle
import re

import pytest

import lockstep
from lockstep import errors

CLASSES = [each for each in vars(errors).values() if inspect.isclass(each)]
LINE = re.compile(r"^ {4}(?P<bars>[│ ]*)[├└]── (?P<name>\w+)(?: \((?P<builtin>\w+)\))? {2,}\S", re.MULTILINE)


def drawn():
    """Name to (parent, builtin), as the docstring draws them."""
    result, parents = {}, {0: "LockstepError"}
    for match in LINE.finditer(errors.__doc__):
        depth = len(match["bars"]) // 4
        result[match["name"]] = (parents[depth], match["builtin"])
        parents[depth + 1] = match["name"]
    return result


def test_the_docstring_draws_every_class_and_its_bases():
    for name, (parent, builtin) in drawn().items():
        bases = [getattr(errors, parent)] + ([getattr(builtins, builtin)] if builtin else [])
        assert list(getattr(errors, name).__bases__) == bases
    assert {each.__name__ for each in CLASSES} == {"LockstepError", *drawn()}


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_is_a_lockstep_error_and_travels(error):
    assert issubclass(error, lockstep.LockstepError)
    arrived = pickle.loads(pickle.dumps(error("words")))
    assert type(arrived) is error
    assert str(arrived) == "words"


def test_a_loss_that_is_not_finite():
    assert str(errors.NonFiniteError.at(step=3, shard=2, value=float("inf"))) == (
        "The loss is inf in step 3, shard 2. The model is as it was before that step. "
        "Check the examples of this shard, or use a smaller learning rate or clip_norm=1.0."
    )
