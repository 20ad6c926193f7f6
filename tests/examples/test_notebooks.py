"""The notebook of the concise chapter: its cells run, and its stored outputs are what they print."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "chapters").glob("*.ipynb"))
SETTINGS = "num_epochs, num_images, width = 10, 3_000, 8"

# What a notebook's kernel does with a cell, with a stand-in for IPython's pictures and for Fashion-MNIST's files.
KERNEL = """
import ast, json, sys
from types import ModuleType, SimpleNamespace
import numpy as np
import rich
import lockstep.datasets

def images(count):
    generator = np.random.default_rng(count)
    return generator.integers(0, 256, (count, 28, 28), dtype=np.uint8), generator.integers(0, 10, count)

def display(image, display_id):
    print(f"picture {image.data[1:4].decode()}")
    return SimpleNamespace(update=lambda new: None)

lockstep.datasets.fashion_mnist = lambda: (images(40), images(16))
rich.reconfigure(force_jupyter=True)
shown = ModuleType("IPython.display")
shown.Image, shown.display = lambda data: SimpleNamespace(data=data), display
package = ModuleType("IPython")
package.version_info = (9, 0)  # which matplotlib asks for
sys.modules |= {"IPython": package, "IPython.display": shown}
names = {"__name__": "__main__"}
for source in json.load(sys.stdin):
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is not None and (value := eval(compile(ast.Expression(last.value), "cell", "eval"), names)) is not None:
        print(repr(value))
    print("end of cell", flush=True)
"""


def read_cells(path):
    """The source of each code cell, and its outputs."""
    cells = [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    return [("".join(cell["source"]), cell["outputs"]) for cell in cells]


def format_output(output):
    """A stored output as the stand-in for the kernel prints it."""
    if output["output_type"] == "stream":
        return "".join(output["text"])
    assert output["output_type"] != "error", output
    data = output["data"]
    return "picture PNG\n" if "image/png" in data else "".join(data["text/plain"]) + "\n"


def mask_numbers(text):
    return re.sub(r"[0-9a-f]{64}|-?\d+(?:\.\d+)?(?:e-?\d+)?", "#", re.sub(r"\s+", " ", text))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_stored_outputs_are_what_the_cells_print(path, tmp_path):
    sources, outputs = zip(*read_cells(path), strict=True)
    assert sum(source.count(SETTINGS) for source in sources) == 1
    small = [source.replace(SETTINGS, "num_epochs, num_images, width = 2, 40, 2") for source in sources]
    result = subprocess.run(
        [sys.executable, "-c", KERNEL],
        input=json.dumps(small),
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    printed = result.stdout.split("end of cell\n")[:-1]
    stored = ["".join(map(format_output, each)) for each in outputs]
    assert [mask_numbers(text) for text in stored] == [mask_numbers(text) for text in printed]
    assert sum("picture PNG" in text for text in stored) == 3  # `Plot`, live in the cell
    assert "True\n" in printed  # one device and two give the same bits, also at this size


def test_there_is_a_notebook():
    assert [path.name for path in NOTEBOOKS] == ["concise_torch.ipynb"]
