"""What a person sees of a run: the bar, the lines, the breakdown of the time, curves."""
