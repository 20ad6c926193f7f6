"""Every example of docs/collectives.md prints what the page says."""

import doctest
import importlib
import os
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "collectives.md"
BACKENDS = os.environ.get("LOCKSTEP_BACKENDS", "numpy,torch").split(",")
EXAMPLES = re.findall(
    r"^```python\n(>>> import (\w+), lockstep\n.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S
)

for name in {*BACKENDS} - {"keras"}:  # now: what a framework leaves in the environment stays there
    importlib.import_module(f"collectives.kits.{name}")


def test_every_framework_has_an_example_of_each():
    assert len(EXAMPLES) == 4 * 4 + 1  # replicate, split, allreduce, shards; evaluation in PyTorch alone
    assert len({framework for _, framework in EXAMPLES}) == 4


@pytest.mark.filterwarnings("ignore" if "mxnet" in BACKENDS else "error")  # numpy 1.23 is about to drop names it uses
@pytest.mark.parametrize(
    "text", [text for text, framework in EXAMPLES if framework in BACKENDS], ids=lambda text: text.split("\n")[1][4:40]
)
def test_it_prints_what_the_page_says(text):
    example = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    assert doctest.DocTestRunner().run(example).failed == 0
