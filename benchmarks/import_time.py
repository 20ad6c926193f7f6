"""How long `import lockstep` takes, NumPy included: `python benchmarks/import_time.py`, on a quiet machine."""

import statistics
import subprocess
import sys

SCRIPT = "import time; start = time.perf_counter(); import lockstep; print(time.perf_counter() - start)"
RUNS = 20


def main() -> None:
    """Imports it in fresh interpreters and prints the distribution."""
    command = [sys.executable, "-c", SCRIPT]
    subprocess.run(command, check=True, capture_output=True)  # which compiles the modules
    times = sorted(
        float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(RUNS)
    )
    print(
        f"import lockstep: median {statistics.median(times):.3f} s, mean {statistics.mean(times):.3f} s, "
        f"p95 {times[int(0.95 * RUNS)]:.3f} s of {RUNS} runs"
    )


if __name__ == "__main__":
    main()
