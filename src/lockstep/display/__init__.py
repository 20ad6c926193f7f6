"""The output of a run: the progress bar, the lines per epoch, the table of times, and the curves."""
