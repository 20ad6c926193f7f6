"""The worker pool: messages, relayed output, the workers' surroundings, and how their end is reported."""

import functools
import gc
import io
import os
import pickle
import platform
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from launch import worker_entries as entries
from lockstep.errors import PlatformError, WorkerError
from lockstep.launch.channel import Channel
from lockstep.launch.worker import Worker
from lockstep.launch.worker_pool import WorkerPool, require_linux


@contextmanager
def running(*todo: Callable[[Channel], None], share: tuple[int, ...] = ()) -> Iterator[list[Worker]]:
    pool = WorkerPool(share=share)
    try:
        yield [pool.start(f"cpu:{index + 1}", entry) for index, entry in enumerate(todo)]
    finally:
        pool.close()


def spawned(workers: Sequence[Worker]) -> list[int]:
    """The workers' pids."""
    for worker in workers:
        worker.wait_until_spawned()
    return [worker.pid for worker in workers if worker.pid is not None]


def two_idle_workers() -> tuple[WorkerPool, list[int]]:
    """A pool of two workers, and their pids."""
    pool = WorkerPool()
    return pool, spawned([pool.start(name, entries.echo) for name in ("cpu:1", "cpu:2")])


def gone(pid: int) -> bool:
    """Whether the process runs no more: no trace of it, or dead and waiting for whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for_the_relay_to_end() -> None:
    deadline = time.monotonic() + 60
    while any(thread.name == "lockstep-relay" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)


def test_messages_are_sent_and_received() -> None:
    with running(entries.echo, entries.echo, entries.echo) as workers:
        for index in range(3):
            workers[index].send(bytes([index]) * 200_000)
        assert [workers[index].receive() for index in range(3)] == [bytes([index]) * 200_000 for index in range(3)]
        assert not any(worker.has_ended() for worker in workers)
        pids = spawned(workers)
    assert len(set(pids)) == 3
    assert all(map(gone, pids))


def test_a_function_of_the_script_itself() -> None:
    with running(lambda channel: channel.send(b"a lambda")) as workers:
        assert workers[0].receive() == b"a lambda"


def test_output_has_the_workers_name_before_each_line(capsys: pytest.CaptureFixture[str]) -> None:
    with running(entries.speak, entries.speak) as workers:
        assert [workers[0].receive(), workers[1].receive()] == [b"spoken", b"spoken"]
    out, err = capsys.readouterr()
    for name in ("cpu:1", "cpu:2"):
        said = [line for line in out.splitlines() if line.startswith(f"[{name}]")]
        assert said == [f"[{name}] one", f"[{name}] two", f"[{name}] raw \ufffd", f"[{name}] no end"]
        assert f"[{name}] à côté\n" in err
    assert len(out.splitlines()) == 8


def test_output_is_relayed_while_the_worker_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def count(channel: Channel) -> None:
        print("at once")
        channel.receive()

    with running(count):
        deadline = time.monotonic() + 60
        out = ""
        while "at once" not in out and time.monotonic() < deadline:
            out += capsys.readouterr().out
            time.sleep(0.01)
    assert out == "[cpu:1] at once\n"


def test_a_long_line_is_relayed_in_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    def draw(channel: Channel) -> None:
        print("x" * 300_000, end="\r", flush=True)
        channel.send(b"drawn")

    with running(draw) as workers:
        assert workers[0].receive() == b"drawn"
    out = capsys.readouterr().out
    assert out.count("x") == 300_000
    assert len(out.splitlines()) > 1


def test_a_closed_stdout_does_not_reach_the_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed = (tmp_path / "out").open("w")
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    monkeypatch.setattr(sys, "stderr", None)
    with running(entries.speak) as workers:
        assert workers[0].receive() == b"spoken"


def test_characters_that_the_scripts_stdout_cannot_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    with running(entries.speak) as workers:
        workers[0].receive()
    assert written.getvalue() == b"[cpu:1] \\xe0 c\\xf4t\\xe9\n"


def test_a_worker_has_the_scripts_path_and_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "user modules"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "3"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "yes")
    memory = os.memfd_create("test")
    with running(entries.describe, share=(memory,)) as workers:
        path, folder, argv, ignores, inheritable, stdin, group, variables = eval(workers[0].receive())
        assert group == workers[0].pid
    os.close(memory)
    assert path == sys.path
    assert folder == str(tmp_path)
    assert argv == ["train.py", "--epochs", "3"]
    assert ignores is True
    assert inheritable == []
    assert stdin == ""
    assert {name for name, value in variables.items() if value is not None} == {"KEPT"}


def test_shared_descriptors_keep_their_numbers() -> None:
    memory = os.memfd_create("test")
    os.ftruncate(memory, 3)
    todo = [functools.partial(entries.write_shared, descriptor=memory, index=index) for index in range(3)]
    with running(*todo, share=(memory,)) as workers:
        for index in range(3):
            workers[index].receive()
        assert os.pread(memory, 3, 0) == b"ABC"
    os.close(memory)


def test_the_interpreters_options_are_kept() -> None:
    script = (
        "import sys; from lockstep.launch.worker_pool import WorkerPool\n"
        "def entry(channel): channel.send(repr((sys.flags.optimize, sys.warnoptions, sys.flags.utf8_mode)).encode())\n"
        "pool = WorkerPool(); print(pool.start('cpu:1', entry).receive().decode())"
    )
    command = [sys.executable, "-O", "-W", "error::ResourceWarning", "-X", "utf8", "-c", script]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": ""}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert result.stdout == "(1, ['error::ResourceWarning'], 1)\n", result.stderr


def test_an_exception_is_raised_again_with_the_workers_traceback() -> None:
    with running(entries.echo, entries.raise_own) as workers:
        with pytest.raises(entries.ScriptError, match="shard 3 is bad") as caught:
            workers[1].receive()
        workers[0].send(b"the other lives")
        assert workers[0].receive() == b"the other lives"
    assert "The traceback in worker cpu:2:" in caught.value.__notes__[0]
    assert "in raise_own" in caught.value.__notes__[0]


def test_an_exception_of_a_class_of_the_script_is_that_class() -> None:
    class Local(Exception):
        pass

    def fail(channel: Channel) -> None:
        raise Local("mine")

    with running(fail) as workers, pytest.raises(Local, match="mine"):
        workers[0].receive()


def test_an_exception_that_cannot_be_pickled() -> None:
    with running(entries.raise_fussy) as workers, pytest.raises(WorkerError, match="raised Fussy: shard 3"):
        workers[0].receive()


def test_messages_before_the_exception_come_first() -> None:
    with running(entries.send_then_raise) as workers:
        assert workers[0].receive() == b"x" * 1000
        with pytest.raises(entries.ScriptError, match="after a message"):
            workers[0].receive()


def test_a_failure_that_is_not_received_is_raised_later() -> None:
    with running(entries.echo, entries.raise_at_length, entries.send_then_raise) as workers:
        spawned(workers)
        assert len(select.select([workers[1].pidfd], [], [], 60)[0]) == 1
        assert len(select.select([workers[2].pidfd], [], [], 60)[0]) == 1
        assert [worker.has_ended() for worker in workers] == [False, True, True]
        assert workers[1].describe_end() == "left with exit code 1"
        with pytest.raises(WorkerError, match="raised ScriptError: xxx"):
            workers[1].raise_end()
        with pytest.raises(entries.ScriptError, match="after a message"):  # past the message before it
            workers[2].raise_end()


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (entries.exit_with_3, ["Worker cpu:1 (pid ", "left with exit code 3", "\n  about to leave"]),
        (entries.crash, ["was killed by SIGSEGV", "Fatal Python error: Segmentation fault", "in crash"]),
        (lambda channel: None, ["left with exit code 0", "It wrote nothing to stderr."]),
        (entries.exit_with_a_message, ["left with exit code 1", "\n  no space left"]),
    ],
)
def test_the_error_says_how_the_worker_ended(entry: Callable[[Channel], None], words: list[str]) -> None:
    with running(entry) as workers:
        with pytest.raises(WorkerError) as caught:
            workers[0].receive()
        assert workers[0].has_ended()
        assert workers[0].describe_end() in str(caught.value)
        with pytest.raises(WorkerError):
            workers[0].send(b"x" * 1_000_000)
    for part in words:
        assert part in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_killed_worker_is_noticed() -> None:
    with running(entries.echo, entries.sleep) as workers:
        assert workers[1].receive() == b"asleep"
        killer = threading.Timer(0.2, os.kill, [workers[1].pid, signal.SIGKILL])
        killer.start()
        with pytest.raises(WorkerError, match=r"Worker cpu:2 \(pid \d+\) was killed by SIGKILL \(the kernel"):
            workers[1].receive()
        killer.join()
        assert workers[1].has_ended()
        workers[0].send(b"the other lives")
        assert workers[0].receive() == b"the other lives"


def test_a_worker_that_closes_its_channel_and_runs_on_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.launch.worker._SECONDS_TO_END", 0.3)
    with running(entries.close_channel) as workers:
        workers[0].send(b"close")
        with pytest.raises(WorkerError, match="closed its channel and ran on, so it was killed"):
            workers[0].receive()
        with pytest.raises(WorkerError, match="closed its channel and ran on, so it was killed"):
            workers[0].send(b"x" * 1_000_000)
        assert workers[0].has_ended()


@pytest.mark.parametrize("entry", [entries.fork_and_die, entries.leave_a_child_with_our_output])
def test_a_death_is_noticed_though_a_child_of_the_worker_lives_on(entry: Callable[[Channel], None]) -> None:
    with running(entry) as workers:
        child = int(workers[0].receive())
        try:
            workers[0].send(b"die")
            with pytest.raises(WorkerError, match="left with exit code 5"):
                workers[0].receive()
            workers[0].stop()
            assert not gone(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_worker_that_cannot_import_the_users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_model.py").write_text("def entry(channel): channel.send(b'found')\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        import user_model  # type: ignore[import-not-found]

        with running(user_model.entry) as workers:
            assert workers[0].receive() == b"found"
    with running(user_model.entry) as workers, pytest.raises(WorkerError) as caught:
        workers[0].receive()
    assert "cannot import 'user_model'" in str(caught.value)
    assert "Put the module's folder on sys.path" in str(caught.value)
    assert "ModuleNotFoundError" in caught.value.__notes__[0]
    del sys.modules["user_model"]


def test_a_payload_that_cannot_be_unpickled() -> None:
    class Missing:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
            return getattr, (entries, "ohce")

        def __call__(self, channel: Channel) -> None:
            pass

    match = r"cannot unpickle the model, .* AttributeError: .*ohce"
    with running(Missing()) as workers, pytest.raises(WorkerError, match=match):
        workers[0].receive()


def test_a_worker_that_cannot_find_lockstep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not (Path(entry) / "lockstep").is_dir()])
    with running(entries.echo) as workers, pytest.raises(WorkerError, match="left with exit code 1") as caught:
        workers[0].receive()
    assert "The last lines of its stderr:\n" in str(caught.value)
    assert "No module named 'lockstep'" in str(caught.value)


def test_close_lets_workers_exit_and_is_idempotent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.launch.supervisor._SECONDS_TO_EXIT", 60)  # as many as a loaded machine takes
    pool = WorkerPool()
    workers = [pool.start("cpu:1", entries.echo), pool.start("cpu:2", entries.echo)]
    for worker in workers:
        worker.send(b"up")
        worker.receive()
    pool.close()
    assert [worker.describe_end() for worker in workers] == ["left with exit code 0"] * 2  # they exited by themselves
    pool.close()
    for use in (
        lambda: workers[0].send(b""),
        workers[0].receive,
        workers[0].has_message,
        workers[0].wait_until_spawned,
        lambda: pool.start("cpu:3", entries.echo),
    ):
        with pytest.raises(WorkerError, match="The workers were closed"):
            use()
    assert workers[0].has_ended()
    assert (workers[0].pidfd, workers[0].fileno()) == (-1, -1)
    workers[0].stop()


def test_close_kills_workers_that_do_not_exit() -> None:
    with running(entries.sleep, entries.sleep, entries.sleep) as workers:
        for index in range(3):
            workers[index].receive()
        pids = spawned(workers)
        os.kill(pids[2], signal.SIGSTOP)
    assert all(map(gone, pids))


def test_workers_that_have_not_read_their_entry_end_too() -> None:
    pool, pids = two_idle_workers()
    pool.close()
    assert all(map(gone, pids))


def test_collected_workers_are_closed() -> None:
    pool, pids = two_idle_workers()
    del pool
    gc.collect()
    assert all(map(gone, pids))


def test_the_pool_may_be_garbage_collected_in_the_relay_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    collected = threading.Event()

    class Collecting(io.StringIO):
        def write(self, text: str) -> int:
            if not collected.is_set():
                gc.collect()
                collected.set()
            return super().write(text)

    def speak_when_told(channel: Channel) -> None:
        channel.receive()
        print("collect")
        channel.receive()

    with monkeypatch.context() as patch:
        gc.disable()
        pool = WorkerPool()
        worker = pool.start("cpu:1", speak_when_told)
        pids = spawned([worker])
        cycle: list[object] = [pool]
        cycle.append(cycle)
        patch.setattr(sys, "stdout", Collecting())
        worker.send(b"speak")
        del pool, cycle
        assert collected.wait(10)
        gc.enable()
    wait_for_the_relay_to_end()
    assert all(map(gone, pids))


def test_workers_outlive_the_thread_that_created_the_pool() -> None:
    pool = WorkerPool()
    made: list[Worker] = []

    def make() -> None:
        worker = pool.start("cpu:1", entries.echo)
        worker.send(b"up")
        worker.receive()
        made.append(worker)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    time.sleep(0.2)
    made[0].send(b"still here")
    assert made[0].receive() == b"still here"
    pool.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_copy_of_the_pool_does_not_end_the_workers() -> None:
    pool = WorkerPool()
    worker = pool.start("cpu:1", entries.echo)
    try:
        worker.send(b"up")
        worker.receive()
        pid = os.fork()
        if pid == 0:
            try:
                worker.stop()
                with pytest.raises(WorkerError, match="The workers were closed"):
                    pool.start("cpu:2", entries.echo)
                pool.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        worker.send(b"still here")
        assert worker.receive() == b"still here"
    finally:
        pool.close()


def test_a_worker_that_cannot_be_started_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Scarce(subprocess.Popen[bytes]):
        def __init__(self, *arguments: object, **options: object) -> None:
            if len(started) == 2:
                raise OSError(11, "Resource temporarily unavailable")
            super().__init__(*arguments, **options)  # type: ignore[call-overload]
            started.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Scarce)
    message = r"Worker cpu:3 could not be started: .*temporarily unavailable\. Use fewer devices"
    with running(entries.echo, entries.echo, entries.echo) as (*others, third):
        for use in (third.wait_until_spawned, third.receive, lambda: third.send(b""), third.raise_end):
            with pytest.raises(WorkerError, match=message):
                use()
        assert third.has_message()
        assert third.has_ended()
        assert third.describe_end() == "could not be started: [Errno 11] Resource temporarily unavailable"
        third.stop()
        for other in others:
            other.send(b"up")
            assert other.receive() == b"up"
    assert len(started) == 2
    assert all(map(gone, started))


def test_nothing_is_left_when_a_descriptor_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = os.pidfd_open

    def scarce(pid: int) -> int:
        calls.append(pid)
        if len(calls) == 3:  # the first is the question whether there is such a call
            raise OSError(24, "Too many open files")
        return real(pid)

    monkeypatch.setattr(os, "pidfd_open", scarce)
    with running(entries.echo, entries.echo) as workers:
        workers[0].wait_until_spawned()
        with pytest.raises(WorkerError, match="Too many open files"):
            workers[1].wait_until_spawned()
        assert gone(calls[2])
    assert gone(calls[1])


def fail_with(error: Exception) -> Callable[..., NoReturn]:
    def fail(*arguments: object) -> NoReturn:
        raise error

    return fail


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("threading.Thread.start", RuntimeError("can't start new thread")),
        ("selectors.DefaultSelector", OSError(24, "Too many open files")),
        ("os.eventfd", OSError(24, "Too many open files")),
    ],
)
def test_a_pool_whose_thread_cannot_start(monkeypatch: pytest.MonkeyPatch, target: str, error: Exception) -> None:
    pool = WorkerPool()
    with monkeypatch.context() as patch:
        patch.setattr(target, fail_with(error))
        with pytest.raises(WorkerError, match=f"could not be started: .*{error.args[-1]}"):
            pool.start("cpu:1", entries.echo).receive()
    worker = pool.start("cpu:1", entries.echo)  # it is tried again
    worker.send(b"up")
    assert worker.receive() == b"up"
    pool.close()


def test_workers_are_started_and_stopped_one_by_one() -> None:
    pool = WorkerPool()
    workers = [pool.start(f"cpu:{index}", entries.echo) for index in range(2)]
    for index in range(2, 5):
        for worker in workers:
            worker.send(b"up")
            assert worker.receive() == b"up"
            assert not worker.has_message()
        workers.append(pool.start(f"cpu:{index}", entries.echo))
        os.kill(spawned(workers)[1], signal.SIGSTOP)
        lost = workers.pop(1)
        lost.stop()
        lost.stop()
        assert lost.has_ended()
        assert lost.describe_end().startswith("was killed by SIGKILL")
    pids = spawned(workers)
    assert len(pids) == 2
    pool.close()
    assert all(map(gone, pids))


def test_a_process_that_does_not_end_after_its_kill_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.launch.supervisor._SECONDS_TO_CLOSE", 1.0)
    with running(entries.sleep, entries.echo) as workers:
        assert workers[0].receive() == b"asleep"
        with monkeypatch.context() as without_kill:
            without_kill.setattr("lockstep.launch.process.Process.kill", lambda process: None)
            began = time.monotonic()
            workers[0].stop()
            workers[0].stop()
            assert 1.0 <= time.monotonic() - began < 2.0
            assert not workers[0].has_ended()
            workers[1].send(b"the other lives")
            assert workers[1].receive() == b"the other lives"


def test_a_message_is_noticed_without_blocking() -> None:
    with running(entries.sleep, entries.exit_with_3) as workers:
        deadline = time.monotonic() + 60
        while not all(worker.has_message() for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert workers[0].receive() == b"asleep"
        assert not workers[0].has_message()
        with pytest.raises(WorkerError, match="left with exit code 3"):
            workers[1].receive()
        assert workers[1].has_message()


def test_a_start_does_not_wait_for_a_worker_that_does_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    """While one worker does not read its large entry, others are started and their output is relayed."""

    def speak_for(data: pickle.PickleBuffer, channel: Channel) -> None:
        print("spoken")
        channel.send(bytes(data)[:2])

    large = functools.partial(speak_for, pickle.PickleBuffer(b"x" * 50_000_000))
    pool = WorkerPool()
    slow = pool.start("cpu:1", large)
    (pid,) = spawned([slow])
    os.kill(pid, signal.SIGSTOP)
    fast = pool.start("cpu:2", large)
    assert fast.receive() == b"xx"
    assert not slow.has_message()
    os.kill(pid, signal.SIGCONT)
    assert slow.receive() == b"xx"
    pool.close()
    assert sorted(capsys.readouterr().out.splitlines()) == ["[cpu:1] spoken", "[cpu:2] spoken"]


def test_what_is_pickled_already_is_sent_without_a_copy() -> None:
    """Read-only buffers are read from where they are, others are copied when the worker is started."""
    size = 1 << 23  # more than is sent before the worker reads
    read_only, writable = b"a" * size, bytearray(b"b" * 1000)

    def answer(first: pickle.PickleBuffer, second: pickle.PickleBuffer, channel: Channel) -> None:
        channel.send(bytes(first) + bytes(second))

    before = sys.getrefcount(read_only)
    pool = WorkerPool()
    worker = pool.start(
        "cpu:1", functools.partial(answer, pickle.PickleBuffer(read_only), pickle.PickleBuffer(writable))
    )
    writable[:] = b"c" * 1000
    assert sys.getrefcount(read_only) > before
    assert worker.receive() == b"a" * size + b"b" * 1000
    assert sys.getrefcount(read_only) == before  # what was sent is not kept
    pool.close()


def test_a_dropped_pool_whose_finalizer_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may fall into the finalizer; the thread notices by itself that the pool is gone."""
    with monkeypatch.context() as patch:
        patch.setattr(weakref, "finalize", lambda *arguments: None)
        pool, pids = two_idle_workers()
    del pool
    wait_for_the_relay_to_end()
    assert all(map(gone, pids))


@pytest.mark.parametrize("missing", ["memfd_create", "pidfd_open", "eventfd"])
def test_other_platforms_are_refused(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.delattr(os, missing)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "release", lambda: "24.1.0")
    with pytest.raises(PlatformError, match=rf"need Linux .* This is Darwin 24\.1\.0: .*{missing}.* Use devices=1\."):
        WorkerPool()
    with pytest.raises(OSError, match="need Linux"):
        require_linux()


def test_a_kernel_without_the_system_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(PlatformError, match=r"Function not implemented\. Use devices=1\."):
        require_linux()
