"""What brings the partial sums of several processes together."""
