"""The frameworks, each behind the one seam in `base`."""
