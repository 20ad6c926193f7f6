"""A file is written whole or not at all, and through to the disk."""

import os
import stat
from pathlib import Path

import pytest

from lockstep.core.atomic_file import append_to_file, replace_file


def list_names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_made_with_its_folder_and_replaced(tmp_path):
    path = tmp_path / "runs" / "log.csv"
    for data in (b"first", b"", b"third"):
        replace_file(path, data)
        assert path.read_bytes() == data
    assert list_names(path.parent) == ["log.csv"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "log.csv"
    path.write_bytes(b"old")

    def fail(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list_names(tmp_path) == ["log.csv"]


def test_the_content_is_on_the_disk_before_the_name_and_the_name_before_the_call_returns(tmp_path, monkeypatch):
    path, events, sync = tmp_path / "log.csv", [], os.fsync

    def record(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        events.append(("folder" if is_folder else "file", path.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    replace_file(path, b"new")
    assert events == [("file", False), ("folder", True)]
    append_to_file(path, b"er")
    assert events[2:] == [("file", True)]
    assert path.read_bytes() == b"newer"


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    replace_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_device_is_written_to_and_not_replaced():
    replace_file(Path(os.devnull), b"nothing")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_the_mode_follows_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
