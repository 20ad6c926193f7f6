import os

# Lockstep provides this for good, and the leak fixture would take it for a leak.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
