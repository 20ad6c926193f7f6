"""The chapters run, at a reduced size, as a user starts them; and those of the four frameworks read alike."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHAPTERS = ROOT / "examples" / "chapters"
FRAMEWORKS = ("torch", "jax", "tensorflow", "mxnet")
CONCISE = ("torch", "jax", "jax_linen", "tensorflow", "mxnet")
CHOSEN = [name for name in FRAMEWORKS if name in os.environ.get("LOCKSTEP_BACKENDS", "numpy,torch").split(",")]

# Fashion-MNIST's shapes without its files, a ResNet-18 of an eighth of the channels, and the same batch size and
# learning rate for any number of devices. XLA would compile each draw of first weights for a second, and again when
# Lockstep has made its devices: there they come from numpy.
STAND_IN = """
import re, sys
from functools import partialmethod
import numpy as np
import lockstep.datasets

def images(count):
    generator = np.random.default_rng(count)
    return generator.integers(0, 256, (count, 28, 28), dtype=np.uint8), generator.integers(0, 10, count)

def drawn(key, shape, *_, **__):
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape, np.float32) / np.prod(shape[:-1]) ** 0.5)

del sys.argv[0]
if "concise_jax" in sys.argv[0]:
    from flax import linen, nnx
    from jax import numpy as jnp
    for layer in (nnx.Conv, nnx.Linear, linen.Conv, linen.Dense):
        layer.__init__ = partialmethod(layer.__init__, kernel_init=drawn)
num_train, num_test = int(sys.argv.pop()), int(sys.argv.pop())
lockstep.datasets.fashion_mnist = lambda: (images(num_train), images(num_test))
text = open(sys.argv[0], encoding="utf-8").read().replace("batch_size=512, lr=0.2", "batch_size=256, lr=0.1")
before, name, rest = text.partition("class ResNet18" if "class ResNet18" in text else "def resnet18")
wide, following, after = rest.partition("def examples")
narrow = re.sub(r"\\b(64|128|256|512)\\b", lambda channels: str(int(channels[0]) // 8), wide)
exec(compile(before + name + narrow + following + after, sys.argv[0], "exec"), {"__name__": "__main__"})
"""


def printed(name, folder, num_train, num_test, counts=(1, 2)):
    """What a script prints, one epoch on one CPU, on two, and so on."""
    devices = [f"cpu:{index}" for index in range(counts[-1])]
    script = [str(CHAPTERS / f"{name}.py"), "1", *devices, str(num_test), str(num_train)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", STAND_IN, *script]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(path.name for path in folder.glob("*.png")) == [f"{name}_{count}.png" for count in counts]
    closing = re.findall(r"^val acc: \d\.\d\d, \S+ sec/epoch on (.+)$", result.stdout, re.M)
    assert closing == [
        "1 device: cpu:0",
        "2 devices: cpu:0, cpu:1",
        *(f"{count} devices: cpu:0 … cpu:{count - 1}" for count in counts[2:]),
    ]
    return result.stdout


@pytest.mark.parametrize("framework", CHOSEN)
def test_from_scratch_has_the_same_bits_on_1_2_4_and_8_devices(framework, tmp_path):
    output = printed(f"from_scratch_{framework}", tmp_path, num_train=264, num_test=50, counts=(1, 2, 4, 8))
    digests = re.findall(r"[0-9a-f]{64}", output)  # after a batch of 256 and one of 8 examples
    assert len(digests) == 1 + 2 + 4 + 8
    assert len(set(digests)) == 1


@pytest.mark.parametrize("script", [name for name in CONCISE if name.split("_")[0] in CHOSEN])
def test_concise_has_the_same_bits_on_1_2_and_4_devices(script, tmp_path):
    output = printed(f"concise_{script}", tmp_path, num_train=264, num_test=8, counts=(1, 2, 4))
    closing = r"\d\.\d\d, [\d.]+ sec/epoch, [\d.]+ sec in total"
    assert len(re.findall(rf"^without Lockstep: {closing}$", output, re.M)) == 1
    assert re.findall(r"^number of devices: (\d), [\d.]+ sec in total$", output, re.M) == ["1", "2", "4"]
    weights = re.findall(r"^cpu:\d (\[\[.*?\]\])$", output, re.M | re.S)
    assert len(weights) == 1 + 2 + 4
    assert len(set(weights)) == 1
    outputs = re.findall(
        r"^parallel inference: (.*?)^(?:1/1 [^\n]*\n)?parallel evaluation: (.*?)$", output, re.M | re.S
    )
    assert len(outputs) == 3
    assert len(set(outputs)) == 1
    values = r"\[[\d.]+, [\d.]+\]" if script == "tensorflow" else "{'loss': .*, 'accuracy': .*}"  # Keras's is a list
    assert re.fullmatch(values, outputs[0][1])
    digests = re.findall(r"^[0-9a-f]{64}$", output, re.M)
    assert len(digests) == 3
    assert len(set(digests)) == 1


@pytest.mark.parametrize(
    "chapter, function, framework",
    [("from_scratch", function, name) for function in ("train_batch", "train") for name in FRAMEWORKS[1:]]
    + [("concise", "train", name) for name in CONCISE[1:]],
)
def test_they_read_alike(chapter, function, framework):
    mine, first = (body(chapter, name, function) for name in (framework, "torch"))
    assert len(mine) > 5
    own = {"sgd", "loss"} if chapter == "concise" else set()
    own |= {"net", "trainer"} if framework == "jax_linen" else set()  # its TrainState has the optimizer
    assert [line for line in mine if line.split(" ")[0] not in own] == [
        line for line in first if line.split(" ")[0] not in own
    ]


def body(chapter, framework, function):
    """The lines of a script's function, without what names the framework or one of its weights."""
    text = (CHAPTERS / f"{chapter}_{framework}.py").read_text(encoding="utf-8").replace(framework, "…")
    text = re.sub(r'copies\(".*?"\)|weight\.data\[.*?\]', "", text)
    return [line.strip() for line in text[text.index(f"def {function}(") :].split("\n\n\n")[0].splitlines()]


def count_lines(script, *functions):
    """The number of lines of a script's functions that are not blank."""
    path = CHAPTERS / f"{script}.py"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    spans = [
        (node.lineno - 1 - len(node.decorator_list), node.end_lineno)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name in functions
    ]
    return sum(bool(line.strip()) for span in spans for line in text.splitlines()[slice(*span)])


@pytest.mark.parametrize("name", CONCISE)
def test_the_numbers_of_lines_are_those_of_the_readme(name):
    functions = ("gradient", "update", "accuracy", "host", "train_batch", "train")
    by_hand = count_lines(f"from_scratch_{name}", *functions) or ""
    counts = [by_hand, *(count_lines(f"concise_{name}", each) for each in ("train", "train_without_lockstep"))]
    row = "JAX with flax.linen" if name == "jax_linen" else re.search(r"in (\w+)", first_line(name))[1]
    lines = (CHAPTERS / "README.md").read_text(encoding="utf-8").splitlines()
    assert f"| {row} | {' | '.join(map(str, counts))} |".replace("|  |", "| |") in lines


def first_line(name):
    text = (CHAPTERS / f"concise_{name}.py").read_text(encoding="utf-8")
    return text.splitlines()[0].split(", ", 1)[1]


def test_the_page_says_what_the_logs_say():
    command = [sys.executable, "-c", "import chapters; print(chapters.text(), end='')"]
    result = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True, check=True)
    assert result.stdout == (ROOT / "docs" / "chapters.md").read_text(encoding="utf-8")


LOG = """$ python concise_jax_linen.py 10 cpu:0 cpu:1
the machine
without Lockstep: 0.91, 1.5 sec/epoch, 15.0 sec in total
val acc: 0.93, 2.5 sec/epoch on 1 device: cpu:0
number of devices: 1, 25.0 sec in total
DIGEST
"""


def test_a_run_without_lockstep_has_a_line_of_its_own(tmp_path):
    (tmp_path / "concise_jax_linen.log").write_text(LOG.replace("DIGEST", "ab" * 32), encoding="utf-8")
    program = "import chapters, pathlib, sys; chapters.DOCS = pathlib.Path(sys.argv[1]); print(chapters.text())"
    command = [sys.executable, "-c", program, str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True, check=True)
    lines = [re.split(r"\s*\|\s*", line)[1:-1] for line in result.stdout.splitlines() if line.startswith("| jax linen")]
    assert lines == [
        ["jax linen", "concise, without Lockstep", "1", "0.91", "1.5", "1 device: cpu:0", ""],
        [
            "jax linen",
            "concise",
            "1",
            "[0.93](chapters/concise_jax_linen_1.png)",
            "2.5",
            "1 device: cpu:0",
            "`abababababababab`",
        ],
        ["jax linen", "concise", "2", "not run in full", "", "", ""],
    ]
    assert "Below the bar: jax linen concise, without Lockstep on 1.\n" in result.stdout
