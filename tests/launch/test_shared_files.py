"""The descriptors that a controller shares with its workers have an owner at any time."""

import os

import pytest

from lockstep.launch.shared_files import SharedFiles


def test_what_was_opened_is_closed_if_there_is_no_further_descriptor(monkeypatch):
    opened, create = [], os.eventfd

    def limited(value):
        if len(opened) == 3:
            raise OSError(24, "Too many open files")
        opened.append(create(value))
        return opened[-1]

    monkeypatch.setattr(os, "eventfd", limited)
    with pytest.raises(OSError, match="Too many open files"):
        SharedFiles(5, ["control"])
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
