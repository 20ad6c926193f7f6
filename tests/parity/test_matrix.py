"""The table that ends a parity run."""

from parity.matrix import Entry, table


def test_a_row_per_case_and_a_column_per_number_of_devices():
    entries = [
        Entry("jax", "MLP", 8, 8, 3, 3, 12.34),
        Entry("numpy", "dense", 4, 1, 3, 3, 0.01),
        Entry("numpy", "dense", 4, 2, 2, 3, 0.26),
    ]
    assert table(entries) == [
        "framework  case   shards  1 device       2 devices      8 devices",
        "numpy      dense  4       3 of 3, 0.0 s  2 of 3, 0.3 s",
        "jax        MLP    8                                     3 of 3, 12.3 s",
    ]
