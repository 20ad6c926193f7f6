"""The recorded digests: what the parity runs gave before, so that a change which should keep all bits is seen to.

`recorded.json` holds a digest per case for each processor and version of a framework. On another processor or with
other versions nothing can be compared, and the end of the run says so. `LOCKSTEP_RECORD=1 make test-torch` writes a
framework's digests (one framework at a time); a changed row needs its reason in the changelog.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PATH = Path(__file__).with_name("recorded.json")
PACKAGES = {
    "numpy": ("numpy",),
    "torch": ("torch",),
    "jax": ("jax", "jaxlib", "flax", "optax"),
    "tensorflow": ("tensorflow-cpu", "keras"),
    "keras": ("keras", "torch", "jax", "tensorflow-cpu"),
    "mxnet": ("mxnet", "numpy"),
}


def environment(framework: str) -> str:
    """What makes bits comparable: the processor, and the versions of the framework."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES[framework])
    if framework == "jax" and sys.modules["jax"].config.jax_enable_x64:  # as the contract's kit sets it for its process
        versions += ", x64"
    return f"{_processor()}; {versions}"


def digest(steps: Sequence[Mapping[str, str]]) -> str:
    """One digest of all that a case gave, step by step."""
    return hashlib.sha256(json.dumps(steps, sort_keys=True).encode()).hexdigest()


def check(framework: str, case: str, steps: Sequence[Mapping[str, str]]) -> str:
    """Compares with the table: returns "equal", "none" if it has no such row here, or "other"; records if asked to."""
    here, value = environment(framework), digest(steps)
    table: dict[str, dict[str, str]] = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    if os.environ.get("LOCKSTEP_RECORD") == "1":
        table.setdefault(here, {})[case] = value
        part = PATH.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        part.replace(PATH)
    expected = table.get(here, {}).get(case)
    return "none" if expected is None else "equal" if expected == value else "other"


def _processor() -> str:
    """The processor's make, and what instructions it has."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if os.path.exists("/proc/cpuinfo") else ""
    pairs = (line.split(":", 1) for line in info.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in pairs}
    flags = hashlib.sha256(" ".join(sorted(fields.get("flags", "").split())).encode()).hexdigest()[:8]
    return f"{platform.machine()} {fields.get('model name', 'unknown')}, instructions {flags}"
