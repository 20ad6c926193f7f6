"""Generators that the script's code holds are found, seeded for each example, and restored."""

import collections
import functools
import random
import re
import sys
import tempfile
import types

import numpy as np
import pytest

from lockstep.core import find_rng
from lockstep.core.find_rng import find_generators
from lockstep.core.local_rng import IsolatedGenerators
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
def test_a_held_generator_is_found(where):
    assert len(find_generators(HELD[where]())) == 1


def test_the_global_generators_are_not_among_them():
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
def test_held_generators_are_seeded_and_restored(kind):
    make, draw = KINDS[kind]
    one, other = make(), make()
    draw(one), draw(other)
    with IsolatedGenerators([one]) as isolated:
        assert not isolated.has_changed()
        before = isolated.get_states()
        drawn = draw(one)
        assert isolated.has_changed()
        assert isolated.has_changed(before)
        isolated.seed(5)
        first = draw(one)
        isolated.seed(6)
        assert draw(one) != first
        isolated.seed(5)
        assert draw(one) == first != drawn
    assert draw(one) == draw(other)


def test_two_generators_are_seeded_differently():
    one, other = np.random.default_rng(1), np.random.default_rng(1)
    with IsolatedGenerators([one, other]) as isolated:
        isolated.seed(3)
        assert one.normal() != other.normal()


NEW = {
    "default_rng()": lambda: np.random.default_rng().normal(),
    "Generator(PCG64())": lambda: np.random.Generator(np.random.PCG64()).normal(),
    "RandomState()": lambda: np.random.RandomState().normal(),
    "SeedSequence()": lambda: np.random.SeedSequence().entropy,
    "np.random.seed()": lambda: (np.random.seed(), np.random.normal())[1],
    "random.Random()": lambda: random.Random().random(),
}


@pytest.mark.parametrize("kind", NEW)
def test_creating_a_generator_without_a_seed_is_a_draw(kind):
    make = NEW[kind]
    with IsolatedGenerators() as isolated:
        isolated.seed(1)
        before = isolated.get_states()
        first = make()
        assert isolated.has_changed(before)
        isolated.seed(2)
        assert make() != first
        isolated.seed(1)
        assert make() == first
    assert make() != make()  # as ever


def test_creating_a_generator_with_a_seed_is_no_draw():
    with IsolatedGenerators() as isolated:
        assert np.random.default_rng(4).normal() == np.random.default_rng(4).normal()
        assert random.Random(4).random() == random.Random(4).random()
        assert not isolated.has_changed()


def test_names_of_temporary_files_are_no_draw(monkeypatch):
    """`tempfile` creates a generator with the first file, and examples may be unpacked into files."""
    monkeypatch.setattr(tempfile, "_name_sequence", None)
    with IsolatedGenerators() as isolated:
        tempfile.NamedTemporaryFile().close()
        assert not isolated.has_changed()


def test_entries_of_plain_containers_are_searched():
    rng = np.random.default_rng(0)
    plain = [{"text": "a", "ids": [1, 2], "weight": 0.5} for _ in range(100)]
    assert find_generators(plain) == []
    assert find_generators([*plain, {"text": "a", "ids": [1, rng]}]) == [rng]


def test_a_generator_created_while_reading_is_refused():
    class Lazy:
        rng = None

        def __call__(self):
            self.rng = self.rng or np.random.default_rng(0)
            return self.rng.normal()

    lazy = Lazy()
    words = "has created a random number generator and kept it for later examples"
    with pytest.raises(ExactError, match=re.escape(words)), IsolatedGenerators(lazy):
        lazy()
    with IsolatedGenerators(lazy):  # it is there before the next ones are read
        lazy()


@pytest.mark.parametrize("make", [np.random.SeedSequence, np.random.default_rng, np.random.PCG64])
def test_spawning_from_a_held_generator_is_refused(make):
    held = make(5)
    sequence = held if make is np.random.SeedSequence else getattr(held, "_bit_generator", held)._seed_seq
    with (
        pytest.raises(ExactError, match=r"has called spawn\(\) of a random number generator or SeedSequence"),
        IsolatedGenerators([held]),
    ):
        sequence.spawn(1)
    with IsolatedGenerators([held]):  # one that is made for an example is its own
        np.random.SeedSequence(5).spawn(2)


def test_generators_are_restored_after_an_error():
    rng = np.random.default_rng(1)
    with pytest.raises(KeyError), IsolatedGenerators([rng]):
        {}[rng.normal()]
    assert rng.normal() == np.random.default_rng(1).normal()
    assert random.Random.seed.__module__ == "random"
    assert np.random.default_rng().normal() != np.random.default_rng().normal()


def test_a_list_of_records_is_searched_without_a_walk_over_each_class(monkeypatch):
    walked = []
    references = find_rng._list_references
    monkeypatch.setattr(find_rng, "_list_references", lambda value: walked.append(value) or references(value))
    rng = np.random.default_rng(0)
    records = [{"name": str(index), "size": (index, 2), "labels": [1, 2]} for index in range(900)]
    records.append({"name": "last", "made by": (rng,)})
    assert find_generators(types.SimpleNamespace(records=records)) == [rng]
    assert len(walked) < 10
