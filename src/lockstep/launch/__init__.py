"""Worker processes on this host, and the variables of launchers that started this process."""
