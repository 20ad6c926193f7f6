"""Generators that code holds are found wherever it may hold them, seeded, and put back."""

import collections
import functools
import random
import re
import sys
import tempfile
import types

import numpy as np
import pytest

from lockstep.core import held_rng
from lockstep.core.held_rng import IsolatedGenerators, find_generators
from lockstep.errors import ExactError


def make_rng():
    return np.random.default_rng(0)


GLOBAL = make_rng()


class Slotted:
    __slots__ = ("rng",)


class Holder:
    def __init__(self, rng):
        self.parts = [{"deep": (collections.deque([rng]),)}]

    def method(self):
        return self.parts


class Classy:
    rng = make_rng()


def use_global():
    return [GLOBAL.normal() for _ in range(2)]


def in_slots():
    holder = Slotted()
    holder.rng = make_rng()
    return holder


def in_closure():
    rng = make_rng()
    return lambda: rng.normal()


def in_module():
    module = types.ModuleType("augmentation")
    module.rng = make_rng()
    sys.modules["augmentation"] = module
    script = {"__name__": "__main__", "augmentation": module}
    exec("def f(): return augmentation.rng.normal()", script)
    return script["f"]


HELD = {
    "a global in a comprehension": lambda: use_global,
    "a helper's global": lambda: lambda: use_global(),
    "a closure": in_closure,
    "a default": lambda: lambda rng=GLOBAL: rng,
    "a keyword's default": lambda: lambda *, rng=GLOBAL: rng,
    "a partial": lambda: functools.partial(np.random.Generator.normal, make_rng()),
    "a method of it": lambda: make_rng().normal,
    "deep in an attribute": lambda: Holder(make_rng()),
    "the object of a method": lambda: Holder(make_rng()).method,
    "slots": in_slots,
    "a class": Classy,
    "a module of the script's own": in_module,
    "behind a cache": lambda: functools.lru_cache(in_closure()),
    "RandomState": lambda: [np.random.RandomState(0)],
    "a bit generator": lambda: [np.random.Philox(0)],
    "random.Random": lambda: [random.Random(0)],
}


@pytest.mark.parametrize("where", HELD)
def test_found(where):
    assert len(find_generators(HELD[where]())) == 1


def test_the_processs_own_are_not_among_them():
    assert find_generators(lambda: (random.random(), np.random.rand()), [np.random.mtrand._rand, random._inst]) == []


KINDS = {
    "Generator": (lambda: np.random.default_rng(1), lambda rng: rng.normal()),
    "Philox": (lambda: np.random.Generator(np.random.Philox(1)), lambda rng: rng.normal()),
    "RandomState": (lambda: np.random.RandomState(1), lambda rng: rng.normal()),
    "RandomState of SFC64": (lambda: np.random.RandomState(np.random.SFC64(1)), lambda rng: rng.normal()),
    "BitGenerator": (lambda: np.random.MT19937(1), lambda rng: int(rng.random_raw())),
    "Random": (lambda: random.Random(1), lambda rng: rng.random()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_seeded_told_of_and_put_back(kind):
    make, draw = KINDS[kind]
    one, other = make(), make()
    draw(one), draw(other)
    with IsolatedGenerators([one]) as isolated:
        assert not isolated.has_moved()
        before = isolated.states()
        drawn = draw(one)
        assert isolated.has_moved()
        assert isolated.has_moved(before)
        isolated.seed(5)
        first = draw(one)
        isolated.seed(6)
        assert draw(one) != first
        isolated.seed(5)
        assert draw(one) == first != drawn
    assert draw(one) == draw(other)


def test_two_are_seeded_differently():
    one, other = np.random.default_rng(1), np.random.default_rng(1)
    with IsolatedGenerators([one, other]) as isolated:
        isolated.seed(3)
        assert one.normal() != other.normal()


FRESH = {
    "default_rng()": lambda: np.random.default_rng().normal(),
    "Generator(PCG64())": lambda: np.random.Generator(np.random.PCG64()).normal(),
    "RandomState()": lambda: np.random.RandomState().normal(),
    "SeedSequence()": lambda: np.random.SeedSequence().entropy,
    "np.random.seed()": lambda: (np.random.seed(), np.random.normal())[1],
    "random.Random()": lambda: random.Random().random(),
}


@pytest.mark.parametrize("kind", FRESH)
def test_one_without_a_seed_follows_from_the_seed_and_is_a_draw(kind):
    make = FRESH[kind]
    with IsolatedGenerators() as isolated:
        isolated.seed(1)
        before = isolated.states()
        first = make()
        assert isolated.has_moved(before)
        isolated.seed(2)
        assert make() != first
        isolated.seed(1)
        assert make() == first
    assert make() != make()  # as ever


def test_one_with_a_seed_is_no_draw():
    with IsolatedGenerators() as isolated:
        assert np.random.default_rng(4).normal() == np.random.default_rng(4).normal()
        assert random.Random(4).random() == random.Random(4).random()
        assert not isolated.has_moved()


def test_names_of_temporary_files_are_no_draw(monkeypatch):
    """`tempfile` makes a generator of its own with the first file, and examples may be unpacked into files."""
    monkeypatch.setattr(tempfile, "_name_sequence", None)
    with IsolatedGenerators() as isolated:
        tempfile.NamedTemporaryFile().close()
        assert not isolated.has_moved()


def test_plain_entries_are_not_followed_and_others_are():
    rng = np.random.default_rng(0)
    plain = [{"text": "a", "ids": [1, 2], "weight": 0.5} for _ in range(100)]
    assert find_generators(plain) == []
    assert find_generators([*plain, {"text": "a", "ids": [1, rng]}]) == [rng]


def test_one_that_appears_while_reading_is_refused():
    class Lazy:
        rng = None

        def __call__(self):
            self.rng = self.rng or np.random.default_rng(0)
            return self.rng.normal()

    lazy = Lazy()
    words = "has created a random number generator and kept it"
    with pytest.raises(ExactError, match=re.escape(words)), IsolatedGenerators(lazy):
        lazy()
    with IsolatedGenerators(lazy):  # it is there before the next ones are read
        lazy()


@pytest.mark.parametrize("make", [np.random.SeedSequence, np.random.default_rng, np.random.PCG64])
def test_spawning_from_what_is_held_is_refused(make):
    held = make(5)
    sequence = held if make is np.random.SeedSequence else getattr(held, "_bit_generator", held)._seed_seq
    with pytest.raises(ExactError, match="has spawned from a generator or SeedSequence"), IsolatedGenerators([held]):
        sequence.spawn(1)
    with IsolatedGenerators([held]):  # one that is made for an example is its own
        np.random.SeedSequence(5).spawn(2)


def test_after_an_error_everything_is_as_it_was():
    rng = np.random.default_rng(1)
    with pytest.raises(KeyError), IsolatedGenerators([rng]):
        {}[rng.normal()]
    assert rng.normal() == np.random.default_rng(1).normal()
    assert random.Random.seed.__module__ == "random"
    assert np.random.default_rng().normal() != np.random.default_rng().normal()


def test_a_list_of_records_is_looked_through_without_a_walk_over_each_ones_class(monkeypatch):
    walked = []
    references = held_rng._list_references
    monkeypatch.setattr(held_rng, "_list_references", lambda value: walked.append(value) or references(value))
    rng = np.random.default_rng(0)
    records = [{"name": str(index), "size": (index, 2), "labels": [1, 2]} for index in range(900)]
    records.append({"name": "last", "made by": (rng,)})
    assert find_generators(types.SimpleNamespace(records=records)) == [rng]
    assert len(walked) < 10
