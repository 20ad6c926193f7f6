"""The heart of Lockstep: what a step is, in the standard library and numpy alone."""
