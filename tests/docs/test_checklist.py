"""The checklist of the chapters has all of its rows, each with where it is shown; test_paths.py follows the links."""

import re
from collections import Counter
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "checklist.md"


def test_every_row_is_there_and_says_where_or_why_not():
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.+) \| (yes|partly|no) \| (.+) \|$", text, re.M)
    assert [int(number) for number, *_ in rows] == list(range(1, 147))
    assert [number for number, *_, where in rows if "](" not in where] == []
    counts = Counter(state for _, _, state, _ in rows)
    assert f"{counts['yes']} yes, {counts['partly']} partly, {counts['no']} no" in text
