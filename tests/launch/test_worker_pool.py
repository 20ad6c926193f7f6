"""The worker pool: messages, relayed output, the workers' surroundings, and how their end is reported."""

import functools
import gc
import io
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import cloudpickle
import pytest

from launch import worker_entries as entries
from lockstep.errors import PlatformError, WorkerError
from lockstep.launch.channel import Channel
from lockstep.launch.worker_pool import WorkerPool, require_linux


@contextmanager
def running(*todo: Callable[[Channel], None], share: tuple[int, ...] = ()) -> Iterator[WorkerPool]:
    workers = WorkerPool([f"cpu:{index + 1}" for index in range(len(todo))], share=share)
    try:
        workers.start([cloudpickle.dumps(entry) for entry in todo])
        yield workers
    finally:
        workers.close()


def gone(pid: int) -> bool:
    """Whether the process runs no more: no trace of it, or dead and waiting for whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_messages_are_sent_and_received() -> None:
    with running(entries.echo, entries.echo, entries.echo) as workers:
        for index in range(3):
            workers.send(index, bytes([index]) * 200_000)
        assert [workers.receive(index) for index in range(3)] == [bytes([index]) * 200_000 for index in range(3)]
        assert workers.poll_dead() is None
        pids = workers.pids
    assert len(set(pids)) == 3
    assert all(map(gone, pids))


def test_a_function_of_the_script_itself() -> None:
    with running(lambda channel: channel.send(b"a lambda")) as workers:
        assert workers.receive(0) == b"a lambda"


def test_output_has_the_workers_name_before_each_line(capsys: pytest.CaptureFixture[str]) -> None:
    with running(entries.speak, entries.speak) as workers:
        assert [workers.receive(0), workers.receive(1)] == [b"spoken", b"spoken"]
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
        assert workers.receive(0) == b"drawn"
    out = capsys.readouterr().out
    assert out.count("x") == 300_000
    assert len(out.splitlines()) > 1


def test_a_closed_stdout_does_not_reach_the_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed = (tmp_path / "out").open("w")
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    monkeypatch.setattr(sys, "stderr", None)
    with running(entries.speak) as workers:
        assert workers.receive(0) == b"spoken"


def test_characters_that_the_scripts_stdout_cannot_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    with running(entries.speak) as workers:
        workers.receive(0)
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
        path, folder, argv, ignores, inheritable, stdin, group, variables = eval(workers.receive(0))
        assert group == workers.pids[0]
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
            workers.receive(index)
        assert os.pread(memory, 3, 0) == b"ABC"
    os.close(memory)


def test_the_interpreters_options_are_kept() -> None:
    script = (
        "import cloudpickle, sys; from lockstep.launch.worker_pool import WorkerPool\n"
        "def entry(channel): channel.send(repr((sys.flags.optimize, sys.warnoptions, sys.flags.utf8_mode)).encode())\n"
        "workers = WorkerPool(['cpu:1']); workers.start([cloudpickle.dumps(entry)]); print(workers.receive(0).decode())"
    )
    command = [sys.executable, "-O", "-W", "error::ResourceWarning", "-X", "utf8", "-c", script]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": ""}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert result.stdout == "(1, ['error::ResourceWarning'], 1)\n", result.stderr


def test_an_exception_is_raised_again_with_the_workers_traceback() -> None:
    with running(entries.echo, entries.raise_own) as workers:
        with pytest.raises(entries.ScriptError, match="shard 3 is bad") as caught:
            workers.receive(1)
        workers.send(0, b"the other lives")
        assert workers.receive(0) == b"the other lives"
    assert "The traceback in worker cpu:2:" in caught.value.__notes__[0]
    assert "in raise_own" in caught.value.__notes__[0]


def test_an_exception_of_a_class_of_the_script_is_that_class() -> None:
    class Local(Exception):
        pass

    def fail(channel: Channel) -> None:
        raise Local("mine")

    with running(fail) as workers, pytest.raises(Local, match="mine"):
        workers.receive(0)


def test_an_exception_that_cannot_be_pickled() -> None:
    with running(entries.raise_fussy) as workers, pytest.raises(WorkerError, match="raised Fussy: shard 3"):
        workers.receive(0)


def test_messages_before_the_exception_come_first() -> None:
    with running(entries.send_then_raise) as workers:
        assert workers.receive(0) == b"x" * 1000
        with pytest.raises(entries.ScriptError, match="after a message"):
            workers.receive(0)


def test_a_failure_that_is_not_received_is_raised_later() -> None:
    with running(entries.echo, entries.raise_at_length, entries.send_then_raise) as workers:
        assert len(select.select(workers.pidfds[1:2], [], [], 60)[0]) == 1
        assert len(select.select(workers.pidfds[2:3], [], [], 60)[0]) == 1
        assert workers.poll_dead() == 1
        with pytest.raises(WorkerError, match="raised ScriptError: xxx"):
            workers.raise_end(1)
        with pytest.raises(entries.ScriptError, match="after a message"):  # past the message before it
            workers.raise_end(2)


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
            workers.receive(0)
        assert workers.poll_dead() == 0
        with pytest.raises(WorkerError):
            workers.send(0, b"x" * 1_000_000)
    for part in words:
        assert part in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_killed_worker_is_noticed() -> None:
    with running(entries.echo, entries.sleep) as workers:
        assert workers.receive(1) == b"asleep"
        killer = threading.Timer(0.2, os.kill, [workers.pids[1], signal.SIGKILL])
        killer.start()
        with pytest.raises(WorkerError, match=r"Worker cpu:2 \(pid \d+\) was killed by SIGKILL \(the kernel"):
            workers.receive(1)
        killer.join()
        assert workers.poll_dead() == 1
        workers.send(0, b"the other lives")
        assert workers.receive(0) == b"the other lives"


@pytest.mark.parametrize("entry", [entries.fork_and_die, entries.leave_a_child_with_our_output])
def test_a_death_is_noticed_though_a_child_of_the_worker_lives_on(entry: Callable[[Channel], None]) -> None:
    with running(entry) as workers:
        child = int(workers.receive(0))
        try:
            workers.send(0, b"die")
            with pytest.raises(WorkerError, match="left with exit code 5"):
                workers.receive(0)
            workers.close()
            assert not gone(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_worker_that_cannot_import_the_users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_model.py").write_text("def entry(channel): channel.send(b'found')\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        import user_model  # type: ignore[import-not-found]

        with running(user_model.entry) as workers:
            assert workers.receive(0) == b"found"
    with running(user_model.entry) as workers, pytest.raises(WorkerError) as caught:
        workers.receive(0)
    assert "cannot import 'user_model'" in str(caught.value)
    assert "Put its folder on sys.path" in str(caught.value)
    assert "ModuleNotFoundError" in caught.value.__notes__[0]
    del sys.modules["user_model"]


def test_a_payload_that_cannot_be_unpickled() -> None:
    payload = cloudpickle.dumps(entries.echo).replace(b"echo", b"ohce")
    workers = WorkerPool(["cpu:1"])
    workers.start([payload])
    with pytest.raises(WorkerError, match=r"cannot unpickle the model, .* AttributeError: .*ohce"):
        workers.receive(0)
    workers.close()


def test_a_worker_that_cannot_find_lockstep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not (Path(entry) / "lockstep").is_dir()])
    workers = WorkerPool(["cpu:1"])
    with pytest.raises(WorkerError, match="left with exit code 1") as caught:
        workers.receive(0)
    workers.close()
    assert "The last lines of its stderr:\n" in str(caught.value)
    assert "No module named 'lockstep'" in str(caught.value)


def test_close_lets_workers_exit_and_is_idempotent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.launch.worker_pool._SECONDS_TO_EXIT", 60)  # as many as a loaded machine takes
    with running(entries.echo, entries.echo) as workers:
        workers.send(0, b"up")
        workers.send(1, b"up")
        workers.receive(0)
        workers.receive(1)
        processes = workers._processes
        workers.close()
        assert [process.popen.returncode for process in processes] == [0, 0]  # they exited by themselves
        workers.close()
        for use in (
            lambda: workers.send(0, b""),
            lambda: workers.receive(0),
            workers.poll_dead,
            lambda: workers.pidfds,
        ):
            with pytest.raises(WorkerError, match="The workers were closed"):
                use()


def test_close_kills_workers_that_do_not_exit() -> None:
    with running(entries.sleep, entries.sleep, entries.sleep) as workers:
        for index in range(3):
            workers.receive(index)
        os.kill(workers.pids[2], signal.SIGSTOP)
        pids = workers.pids
        workers.close()
    assert all(map(gone, pids))


def test_workers_without_a_payload_exit_too() -> None:
    workers = WorkerPool(["cpu:1", "cpu:2"])
    pids = workers.pids
    workers.close()
    assert all(map(gone, pids))


def test_collected_workers_are_closed() -> None:
    workers = WorkerPool(["cpu:1", "cpu:2"])
    pids = workers.pids
    del workers
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
        workers = WorkerPool(["cpu:1"])
        pids = workers.pids
        workers.start([cloudpickle.dumps(speak_when_told)])
        cycle: list[object] = [workers]
        cycle.append(cycle)
        patch.setattr(sys, "stdout", Collecting())
        workers.send(0, b"speak")
        del workers, cycle
        assert collected.wait(10)
        gc.enable()
    assert all(map(gone, pids))
    deadline = time.monotonic() + 60
    while any(thread.name == "lockstep-relay" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)


def test_workers_outlive_the_thread_that_created_the_pool() -> None:
    made: list[WorkerPool] = []

    def make() -> None:
        workers = WorkerPool(["cpu:1"])
        workers.start([cloudpickle.dumps(entries.echo)])
        workers.send(0, b"up")
        workers.receive(0)
        made.append(workers)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    time.sleep(0.2)
    made[0].send(0, b"still here")
    assert made[0].receive(0) == b"still here"
    made[0].close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_copy_of_the_pool_does_not_end_the_workers() -> None:
    with running(entries.echo) as workers:
        pid = os.fork()
        if pid == 0:
            try:
                workers.close()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        workers.send(0, b"still here")
        assert workers.receive(0) == b"still here"


def test_nothing_is_left_when_the_third_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Scarce(subprocess.Popen[bytes]):
        def __init__(self, *arguments: object, **options: object) -> None:
            if len(started) == 2:
                raise OSError(11, "Resource temporarily unavailable")
            super().__init__(*arguments, **options)  # type: ignore[call-overload]
            started.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Scarce)
    with pytest.raises(
        WorkerError, match=r"Starting the processes of cpu:1, cpu:2, cpu:3 failed: .*temporarily unavailable"
    ):
        WorkerPool(["cpu:1", "cpu:2", "cpu:3"])
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
    with pytest.raises(WorkerError, match="Too many open files"):
        WorkerPool(["cpu:1", "cpu:2"])
    assert all(map(gone, calls[1:]))


@pytest.mark.parametrize("missing", ["memfd_create", "pidfd_open", "eventfd"])
def test_other_platforms_are_refused(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.delattr(os, missing)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(PlatformError, match=rf"need Linux .* This is darwin: .*{missing}.* Use devices=1\."):
        WorkerPool(["cpu:1"])
    with pytest.raises(OSError, match="need Linux"):
        require_linux()


def test_a_kernel_without_the_system_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(PlatformError, match=r"Function not implemented\. Use devices=1\."):
        require_linux()
