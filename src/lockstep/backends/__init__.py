"""One package for each framework, which implements the backend protocol in `base`."""
