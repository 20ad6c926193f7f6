"""The moments, their order, and what is no callback."""

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.callbacks import Callback, Chain, History
from lockstep.callbacks.base import NO_LOGS, Params
from lockstep.errors import LockstepError, StateError

PARAMS: Params = {"epochs": 2, "steps": 3, "batch_size": 8, "examples": 24}
MOMENTS = [
    ("on_train_begin", ()),
    ("on_epoch_begin", (0,)),
    ("on_train_batch_begin", (0,)),
    ("on_train_batch_end", (0,)),
    ("on_test_begin", ()),
    ("on_test_end", ()),
    ("on_epoch_end", (0,)),
    ("on_train_end", ()),
]


def recorder(name: str, calls: list[tuple[Any, ...]]) -> Callback:
    """A callback that notes every moment under its name."""
    callback = Callback()
    for moment, _ in MOMENTS:
        setattr(callback, moment, lambda *arguments, moment=moment: calls.append((name, moment, *arguments)))
    return callback


def test_every_moment_reaches_every_callback_in_order() -> None:
    calls: list[tuple[Any, ...]] = []
    chain = Chain([recorder("a", calls), recorder("b", calls)], trainer=None, params=PARAMS)
    logs = {"loss": 0.5}
    for moment, arguments in MOMENTS:
        getattr(chain, moment)(*arguments, logs)
    assert calls == [(name, moment, *arguments, logs) for moment, arguments in MOMENTS for name in "ab"]


def test_the_chain_has_every_moment_of_a_callback() -> None:
    public = {name for name, value in vars(Callback).items() if callable(value) and not name.startswith("_")}
    assert {"on_epoch_end", "set_params", "state_dict", "load_state_dict", "close"} <= public
    assert public - set(vars(Chain)) == set()


@pytest.mark.parametrize(("moment", "arguments"), MOMENTS)
def test_a_bare_callback_does_nothing_with_or_without_logs(moment: str, arguments: tuple[int, ...]) -> None:
    getattr(Callback(), moment)(*arguments)
    getattr(Callback(), moment)(*arguments, {"loss": 1.0})


def test_callbacks_see_the_trainer_and_share_the_params() -> None:
    trainer = SimpleNamespace(stop_training=False)
    first, second = Callback(), Callback()
    params: Params = {"epochs": 1, "batch_size": None}
    Chain([first, second], trainer, params)
    params["batch_size"] = 64  # learned from the first batch
    assert first.params["batch_size"] == second.params["batch_size"] == 64
    second.trainer.stop_training = True
    assert trainer.stop_training


def test_params_of_one_callback_do_not_leak_into_another() -> None:
    callback = Callback()
    Chain([callback], trainer=None, params=PARAMS)
    assert Callback().params == {}


def test_the_default_logs_are_read_only() -> None:
    assert dict(NO_LOGS) == {}
    with pytest.raises(TypeError):
        NO_LOGS["loss"] = 1.0  # type: ignore[index]


def test_close_is_called_for_all_callbacks_even_if_one_raises() -> None:
    closed = []

    class Broken(Callback):
        def close(self) -> None:
            closed.append("broken")
            raise OSError("disk full")

    class Sound(Callback):
        def close(self) -> None:
            closed.append("sound")

    with pytest.raises(OSError, match="disk full"):
        Chain([Broken(), Sound()], trainer=None, params=PARAMS).close()
    assert closed == ["broken", "sound"]


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (Callback(), r"callbacks is a list\. Got Callback\(\)\. Write callbacks=\[Callback\(\)\]\."),
        (3, r"callbacks is a list\. Got 3\. Write callbacks=\[3\]\."),
        ([Callback], r"Got the class Callback at callbacks\[0\]\. Write Callback\(\)\."),
        ([Callback(), print], r"Got <built-in function print> at callbacks\[1\]\. Subclass lockstep\.Callback"),
        ([History()], r"Got History\(0 epochs\) at callbacks\[0\]"),  # a value, not a callback as in Keras
    ],
)
def test_objects_that_are_no_callback_are_refused(callbacks: Any, message: str) -> None:
    with pytest.raises(LockstepError, match=message):
        Chain(callbacks, trainer=None, params=PARAMS)


class Count(Callback):
    """A callback with a state, empty until it has something to say."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count} if self.count else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state.get("count", 0)


class Other(Count):
    pass


def test_states_go_to_the_callbacks_they_came_from() -> None:
    saved = Chain([Count(1), Callback(), Other(2), Count()], trainer=None, params=PARAMS).state_dict()
    assert saved == [
        {"name": "Count", "state": {"count": 1}},
        {"name": "Other", "state": {"count": 2}},
        {"name": "Count", "state": {}},
    ]
    # What has no state may come and go.
    callbacks = [Callback(), Count(), Other(), Callback(), Count(9)]
    Chain(callbacks, trainer=None, params=PARAMS).load_state_dict(saved)
    assert [callback.count for callback in callbacks if isinstance(callback, Count)] == [1, 2, 0]


@pytest.mark.parametrize(
    ("callbacks", "here"),
    [
        ([], "none"),
        ([Count()], "Count"),
        ([Other(), Count()], "Other, Count"),
        ([Count(), Other(), Other()], "Count, Other, Other"),
    ],
)
def test_other_callbacks_are_refused(callbacks: list[Callback], here: str) -> None:
    saved = Chain([Count(1), Other(2)], trainer=None, params=PARAMS).state_dict()
    with pytest.raises(StateError) as caught:
        Chain(callbacks, trainer=None, params=PARAMS).load_state_dict(saved)
    assert str(caught.value) == (
        "A run goes on with the callbacks that it had. "
        f"Saved are the states of Count, Other, and fit was given {here}. "
        "Give callbacks=[...] of these classes in this order."
    )
    assert all(callback.count == 0 for callback in callbacks if isinstance(callback, Count))


def test_a_bare_callback_has_no_state() -> None:
    callback = Callback()
    assert callback.state_dict() == {}
    callback.load_state_dict({})
    assert Chain([callback], trainer=None, params=PARAMS).state_dict() == []
