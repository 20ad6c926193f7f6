"""Values and arithmetic: the standard library and numpy only."""
