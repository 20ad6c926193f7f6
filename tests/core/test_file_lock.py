"""Locks on open files."""

import os

from lockstep.core import file_lock


def test_exclusive_and_shared_locks(tmp_path):
    first, second = (os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert file_lock.try_lock_exclusive(first)
    assert not file_lock.try_lock_exclusive(second)
    file_lock.lock_shared(first)
    assert not file_lock.try_lock_exclusive(second)
    file_lock.lock_shared(second)
    os.close(first)
    assert file_lock.try_lock_exclusive(second)
    os.close(second)


def test_a_renamed_file_does_not_have_the_name(tmp_path):
    path = tmp_path / "file"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    assert file_lock.has_name(descriptor, path)
    path.rename(tmp_path / "other")
    assert not file_lock.has_name(descriptor, path)
    path.touch()
    assert not file_lock.has_name(descriptor, path)
    os.close(descriptor)
