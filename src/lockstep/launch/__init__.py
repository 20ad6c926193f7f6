"""Processes on this host, and joining a world that another launcher started."""
