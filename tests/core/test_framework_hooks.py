"""Which frameworks count as imported."""

import sys

from lockstep.core import framework_hooks


def test_a_blocked_import_counts_as_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # how a script keeps a package from being imported
    assert "torch" in framework_hooks.list_missing()
    assert framework_hooks.list_imported() == []
