"""Exchanges: how the partial sums of several processes are added."""
