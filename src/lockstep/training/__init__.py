"""What a trainer's methods do: planning, steps, epochs, evaluation, verification, and the state of a run."""
