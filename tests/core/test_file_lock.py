"""Locks on open files."""

import os

from lockstep.core import file_lock


def test_a_file_is_locked_by_one_alone_or_by_several_together(tmp_path):
    first, second = (os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert file_lock.alone(first)
    assert not file_lock.alone(second)
    file_lock.together(first)
    assert not file_lock.alone(second)
    file_lock.together(second)
    os.close(first)
    assert file_lock.alone(second)
    os.close(second)


def test_a_file_that_lost_its_name(tmp_path):
    path = tmp_path / "file"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    assert file_lock.named(descriptor, path)
    path.rename(tmp_path / "other")
    assert not file_lock.named(descriptor, path)
    path.touch()
    assert not file_lock.named(descriptor, path)
    os.close(descriptor)
