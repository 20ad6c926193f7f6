"""A disk that fails at any moment costs nothing but the save: what was there is whole, and nothing is left behind."""

import errno
import os
import resource
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from checkpoint.samples import equal, litter, snapshot
from lockstep.checkpoint import CheckpointFolder, Snapshot, read, write
from lockstep.core.types import Array
from lockstep.errors import SaveError

CALLS = ["mkdir", "open", "write", "fsync", "rename", "symlink", "listdir"]
MOVES = pytest.mark.parametrize("exchange", [True, False])


class Fault:
    """Lets the operating system refuse the call of this number, counted from 0; `made` says how many there were."""

    def __init__(self, monkeypatch, number, code):
        self.made = 0
        for name in CALLS:
            monkeypatch.setattr(os, name, self.refusing(getattr(os, name), number, code))

    def refusing(self, function, number, code):
        def call(*arguments, **options):
            self.made += 1
            if self.made == number + 1:
                raise OSError(code, os.strerror(code))
            return function(*arguments, **options)

        return call


@pytest.fixture(params=[errno.ENOSPC, errno.EACCES], ids=errno.errorcode.get)
def code(request):
    return request.param


def refused(save, code, number, exchange):
    """Whether the call of this number was refused, and so the save; False where there are fewer calls."""
    with pytest.MonkeyPatch.context() as patch:
        if not exchange:
            patch.setattr("lockstep.checkpoint.atomic_folder._exchange", lambda left, right: False)
        fault = Fault(patch, number, code)
        try:
            save()
        except SaveError as error:
            text = str(error)
        else:
            text = ""
    assert bool(text) == (fault.made > number)
    assert os.strerror(code) in text or not text
    return bool(text)


@MOVES
@pytest.mark.parametrize("existing", [True, False])
def test_a_failed_write_leaves_the_older_checkpoint(existing, exchange, code, tmp_path):
    target = tmp_path / "mine"
    if existing:
        write(target, snapshot(1))
    number = 0
    while refused(lambda: write(target, snapshot(2)), code, number, exchange):
        assert litter(tmp_path) == []
        if existing:
            assert equal(read(target), snapshot(1))
        else:
            assert os.listdir(tmp_path) == []
        number += 1
    assert number > 12
    assert equal(read(target), snapshot(2))


@MOVES
def test_a_failed_save_leaves_a_store_as_it_was(exchange, code, tmp_path):
    store = CheckpointFolder(tmp_path, keep=2, best="val_loss")
    number = 0
    going = True
    while going:
        for step in (1, 2, 3):  # the one to be refused removes 1, replaces 3 and leads the link to it
            write(store.path(step), snapshot(step, logs={"val_loss": 5 - step}))
        (tmp_path / "best").unlink(missing_ok=True)
        (tmp_path / "best").symlink_to("step-00000002")
        store = CheckpointFolder(tmp_path, keep=2, best="val_loss")
        going = refused(lambda: store.save(snapshot(3), 3), code, number, exchange)  # noqa: B023
        assert litter(tmp_path) == []
        found, skipped = store.newest()
        assert skipped == ()
        assert found[0] == store.path(3)
        assert store.steps()[-2:] == [2, 3]
        assert read(tmp_path / "best").facts["step"] in (2, 3)
        number += 1
    assert number > 30
    assert store.steps() == [2, 3]
    assert equal(found[1], snapshot(3))


@contextmanager
def limited(nbytes):
    """No file of this process may grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_size_limit_raises_a_save_error(tmp_path):
    """The kernel's own refusal, in the middle of an array: some of it is written, then no more."""
    store = CheckpointFolder(tmp_path)
    store.save(snapshot(1), 1)
    large = Snapshot({"model.w": Array(np.ones(100_000, "float32"), "float32")})
    with limited(100_000), pytest.raises(SaveError, match="File too large"):
        store.save(large, 2)
    assert litter(tmp_path) == []
    assert store.steps() == [1]
    store.save(large, 2)
    assert equal(store.newest().whole[1], large)


@pytest.fixture
def forbidden():
    """A folder that this process may read and not write to, also where it is root's."""
    with tempfile.TemporaryDirectory() as home:
        write(Path(home, "mine"), snapshot(1))
        os.chmod(home, 0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            yield Path(home)
        finally:
            if root:
                os.seteuid(0)
            os.chmod(home, 0o755)


def test_missing_permission_raises_a_save_error(forbidden):
    for name in ("mine", "other"):
        with pytest.raises(SaveError, match=rf"could not be saved to .*{name}.*: Permission denied"):
            write(forbidden / name, snapshot(2))
    with pytest.raises(SaveError, match="Permission denied"):
        CheckpointFolder(forbidden).save(snapshot(2), 2)
    assert os.listdir(forbidden) == ["mine"]
    assert equal(read(forbidden / "mine"), snapshot(1))


@pytest.mark.parametrize("path", ["file/mine", "file/deeper/mine", "broken/mine", "n" * 250])
def test_impossible_paths_raise_a_save_error(path, tmp_path):
    (tmp_path / "file").write_text("words")
    (tmp_path / "broken").symlink_to("nowhere")
    for save in (lambda target: write(target, snapshot()), lambda target: CheckpointFolder(target).save(snapshot(), 1)):
        if path.startswith("n") and save(tmp_path / "short"):
            save = lambda target: write(target, snapshot())  # noqa: E731
        with pytest.raises(SaveError, match=r"Not a directory|File name too long"):
            save(tmp_path / path)
    assert (tmp_path / "file").read_text() == "words"
    assert litter(tmp_path) == []


def test_files_are_synced_before_they_get_their_names(tmp_path, monkeypatch):
    """A power cut cannot be tried here, so this asks for the order: files, their folder, the name, the folder above."""
    log = []
    fsync, rename = os.fsync, os.rename

    def place(path):
        return "temporary" if str(path).endswith(".writing") else Path(path).name

    def logged(descriptor):
        log.append(("sync", place(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", logged)
    monkeypatch.setattr(os, "rename", lambda old, new: (log.append(("name", place(new))), rename(old, new)))
    write(tmp_path / "new" / "mine", snapshot())
    assert log == [
        ("sync", tmp_path.name),  # a folder was made
        ("sync", "model.safetensors"),
        ("sync", "optimizer.safetensors"),
        ("sync", "manifest.json"),
        ("sync", "temporary"),
        ("name", "mine"),
        ("sync", "new"),
    ]
    log.clear()
    write(tmp_path / "new" / "mine", snapshot())  # the names change places, below Python
    assert log[-2:] == [("sync", "temporary"), ("sync", "new")]


def test_an_interrupt_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    write(tmp_path / "mine", snapshot(1))

    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "mine", snapshot(2))
    assert os.listdir(tmp_path) == ["mine"]
    assert equal(read(tmp_path / "mine"), snapshot(1))
