"""Runs the chapters in full and writes docs/chapters.md.

    python benchmarks/chapters.py                                 every chapter whose framework this environment has
    python benchmarks/chapters.py concise_torch                   one of them
    python benchmarks/chapters.py concise_torch cuda:0 cuda:0     on these devices
    python benchmarks/chapters.py page                            only the page, from the runs that are there

Without devices, the accelerators of this host are taken, or its CPU. A run leaves its log and its pictures in
docs/chapters/; the page is made of these, so runs of several hosts come together there.
"""

import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import page

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "examples" / "chapters"
DOCS = ROOT / "docs" / "chapters"
PAGE = ROOT / "docs" / "chapters.md"
NUM_EPOCHS = 10
CHAPTERS = {  # the least test accuracy, to two digits; and what is trained
    "from_scratch": (
        0.84,
        "LeNet with raw parameters, `replicate`, `split`, `allreduce`; batch 256, learning rate 0.2, falling in a "
        "straight line (with 0.2 to the end the last epochs go up and down by a hundredth); pixels are standardized",
    ),
    "concise": (
        0.92,
        "ResNet-18, `wrap`; batch 256, learning rate 0.1 on one device, 512 and 0.2 on two, falling in a straight "
        "line; pixels are between 0 and 1",
    ),
}
PACKAGES = {
    "torch": ("torch",),
    "jax": ("jax", "flax", "optax"),
    "tensorflow": ("tensorflow", "keras"),
    "mxnet": ("mxnet", "numpy"),
}
ALSO = ("concise_jax_linen",)  # a second script for a framework: on the page once it has been run
NOT_RUN = "not run in full"
CLOSING = re.compile(r"^(?:val|test) acc: (?P<accuracy>\S+), (?P<seconds>\S+) sec/epoch on (?P<devices>.+)$", re.M)
BASELINE = re.compile(r"^without Lockstep: (?P<accuracy>\S+), (?P<seconds>\S+) sec/epoch, ", re.M)
DIGEST = re.compile(r"\b[0-9a-f]{64}$", re.M)


def parse_name(name: str) -> tuple[str, str]:
    """The chapter and the framework of a script, the latter with what tells a second script from the first."""
    chapter = next(chapter for chapter in CHAPTERS if name.startswith(f"{chapter}_"))
    return chapter, name.removeprefix(f"{chapter}_").replace("_", " ")


def devices_of(framework: str) -> list[str]:
    """Two devices of this host; a single accelerator stands for both."""
    found: list[str] = importlib.import_module(f"lockstep.backends.{framework}").available()
    return (found * 2)[:2] or ["cpu:0", "cpu:1"]


def hardware(device: str) -> str:
    """The make of the device."""
    if device.startswith("cpu"):
        return page.hardware()[0]
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def run(name: str, devices: Sequence[str]) -> None:
    """Runs one script in full; its log begins with what a reader must know to run it again."""
    framework = parse_name(name)[1].split()[0]
    devices = devices or devices_of(framework)
    command = [f"{name}.py", str(NUM_EPOCHS), *devices]
    versions = ", ".join(f"{package} {importlib.import_module(package).__version__}" for package in PACKAGES[framework])
    DOCS.mkdir(parents=True, exist_ok=True)
    head = f"$ python {' '.join(command)}\n{datetime.now(UTC):%Y-%m-%d}, {hardware(devices[0])}, {versions}\n"
    script = [sys.executable, str(SCRIPTS / command[0]), *command[1:]]
    print(head, end="", flush=True)
    with (
        (DOCS / f"{name}.log").open("w", encoding="utf-8") as log,  # as it goes: a run cut short leaves what it has
        subprocess.Popen(script, cwd=DOCS, stdout=subprocess.PIPE, text=True) as running,
    ):
        log.write(head)
        for line in running.stdout or ():
            print(line, end="", flush=True)
            print(line, end="", file=log, flush=True)
    if running.returncode:
        raise SystemExit(f"{name} ended with {running.returncode}.")


def rows(name: str) -> list[list[str]]:
    """The page's lines for one script: for each number of devices the accuracy, the time and the digest.

    A line for the loop without Lockstep comes first if the log has one; it ran on the first of the devices.
    """
    chapter, framework = parse_name(name)
    log = DOCS / f"{name}.log"
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    result = []
    if baseline := BASELINE.search(text):
        label = [framework, f"{chapter.replace('_', ' ')}, without Lockstep", "1"]
        device = text.split("\n", 1)[0].split()[4]
        result.append([*label, baseline["accuracy"], baseline["seconds"], f"1 device: {device}", ""])
    parts = re.split(r"^(?=(?:val|test) acc)", text, flags=re.M)[1:]
    for count in (1, 2):
        label = [framework, chapter.replace("_", " "), str(count)]
        if count > len(parts):
            result.append([*label, NOT_RUN, "", "", ""])
            continue
        closing, digests = CLOSING.search(parts[count - 1]), DIGEST.findall(parts[count - 1])
        assert closing is not None
        assert len(set(digests)) == 1, f"the replicas of {name} on {count} devices differ: {digests}"
        accuracy = f"[{closing['accuracy']}](chapters/{name}_{count}.png)"
        result.append([*label, accuracy, closing["seconds"], closing["devices"], f"`{digests[0][:16]}`"])
    return result


def text() -> str:
    """The page, out of the logs that are there."""
    names = [f"{chapter}_{framework}" for chapter in CHAPTERS for framework in PACKAGES]
    names += [name for name in ALSO if (DOCS / f"{name}.log").exists()]
    head = ["framework", "chapter", "devices", "test accuracy", "seconds per epoch", "which", "digest"]
    runs = [
        log.read_text(encoding="utf-8").splitlines()[:2] for name in names if (log := DOCS / f"{name}.log").exists()
    ]
    found = [row for name in names for row in rows(name)]
    missing = [
        f"{framework} {chapter} on {count}" for framework, chapter, count, result, *_ in found if result == NOT_RUN
    ]
    bars = {chapter.replace("_", " "): bar for chapter, (bar, _) in CHAPTERS.items()}
    below = [
        f"{framework} {chapter} on {count}"
        for framework, chapter, count, result, *_ in found
        if result != NOT_RUN and float(result.strip("[")[:4]) < bars[chapter.split(",")[0]]
    ]
    lines = [
        "# The chapters",
        "",
        "Training on several devices, twice for every framework, as short scripts: [examples](../examples/chapters).",
        "`make chapters` runs them in full on Fashion-MNIST and writes this page. The concise one for PyTorch is",
        "also a [notebook](../examples/chapters/concise_torch.ipynb), at a size for two CPU cores.",
        "",
        *(f"- *{name.replace('_', ' ')}*: {what}; the bar is {bar:.2f}." for name, (bar, what) in CHAPTERS.items()),
        "",
        page.table(head, found),
        "",
        "Ten epochs each. The digest is the sha256 of the parameters (from scratch) or of the whole state (concise),",
        "the same on every device, in its first 16 digits. The accuracy leads to its curve. Two devices named",
        "`cpu:0, cpu:1` are one processor's, and `cuda:0, cuda:0` one GPU's: they show that it works, not how fast.",
        "",
        "From scratch the digests of one and two devices differ in these runs, which are older than `shards=8` in",
        "the scripts: each device summed the gradient of its own part of the batch in one piece. The scripts as",
        "they are now have one digest on 1, 2, 4 and 8 devices in all four frameworks;",
        "`tests/examples/test_chapters.py` shows it at a reduced size. The concise chapters differ because two",
        "devices train on batches twice as large.",
        "",
        f"Below the bar: {', '.join(below) or 'none'}.",
        "",
        f"Not run in full: {', '.join(missing) or 'none'}. At a reduced size every script runs in the tests.",
        "",
        "## The runs",
        "",
        *(f"    {line}" for lines in runs for line in (*lines, "")),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: Sequence[str]) -> None:
    frameworks = [name for name in PACKAGES if importlib.util.find_spec(name)]
    names = [f"{chapter}_{name}" for chapter in CHAPTERS for name in frameworks]
    names += [name for name in ALSO if parse_name(name)[1].split()[0] in frameworks]
    if arguments and arguments != ["page"]:
        run(arguments[0], arguments[1:])
    elif not arguments:
        for name in names:
            run(name, [])
    PAGE.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
