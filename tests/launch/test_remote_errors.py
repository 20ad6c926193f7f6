"""Exceptions sent from a worker to the script."""

import pickle
import socket
import traceback

import pytest

from launch.worker_entries import Fussy, ScriptError
from lockstep.errors import LockstepError, WorkerError
from lockstep.launch import remote_errors
from lockstep.launch.channel import Channel, FailureReported


class Mute(Exception):
    def __str__(self) -> str:
        raise TypeError("no words")


def failed(exception: BaseException) -> remote_errors.Failure:
    """The failure as it arrives."""
    try:
        raise exception
    except BaseException as error:
        arrived: remote_errors.Failure = pickle.loads(pickle.dumps(remote_errors.encode(error)))
        return arrived


@pytest.mark.parametrize(
    "exception",
    [ValueError("no"), KeyError("name"), ScriptError("own"), WorkerError("ours"), OSError(28, "No space left")],
)
def test_the_type_and_message_are_restored(exception: Exception) -> None:
    with pytest.raises(type(exception)) as caught:
        remote_errors.raise_received(failed(exception), "cpu:1")
    assert str(caught.value) == str(exception)
    assert type(caught.value) is type(exception)
    shown = "".join(traceback.format_exception(caught.value))
    assert "The traceback in worker cpu:1:" in shown
    assert "in failed\n" in shown


@pytest.mark.parametrize(
    ("exception", "message"),
    [
        (Fussy(3, 0.5), "Worker cpu:1 raised Fussy: shard 3 gave 0.5"),
        (ValueError(lambda: socket.socket), "Worker cpu:1 raised ValueError: <function"),  # equal words are asked for
        (Mute(), "Worker cpu:1 raised Mute"),
        # These would act on the script itself.
        (SystemExit(2), "Worker cpu:1 raised SystemExit: 2"),
        (KeyboardInterrupt(), "Worker cpu:1 raised KeyboardInterrupt"),
        (ValueError("x" * 40_000), "Worker cpu:1 raised ValueError: xxx"),
    ],
)
def test_an_exception_that_cannot_be_pickled_becomes_a_worker_error(exception: BaseException, message: str) -> None:
    with pytest.raises(WorkerError) as caught:
        remote_errors.raise_received(failed(exception), "cpu:1")
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, LockstepError)
    assert "The traceback in worker cpu:1:" in caught.value.__notes__[0]


def test_an_exception_that_only_the_worker_can_import() -> None:
    arrived = failed(ScriptError("own"))
    arrived["pickled"] = pickle.dumps(ScriptError("own")).replace(b"entries", b"entrie_")
    with pytest.raises(WorkerError, match="Worker cpu:2 raised ScriptError: own"):
        remote_errors.raise_received(arrived, "cpu:2")


def test_the_cause_is_restored() -> None:
    try:
        try:
            int("missing")
        except ValueError as error:
            raise ScriptError("outer") from error
    except ScriptError as error:
        encoded = remote_errors.encode(error)
    with pytest.raises(ScriptError) as caught:
        remote_errors.raise_received(encoded, "cpu:1")
    assert "ValueError: invalid literal" in caught.value.__notes__[0]


def test_sending_a_long_exception_does_not_block() -> None:
    left, right = (Channel(end) for end in socket.socketpair())
    remote_errors.send_exception(left, ValueError("x" * 50_000_000))  # would block here for ever
    with pytest.raises(FailureReported):
        right.receive()
    left.close()
    right.close()
