"""An extension of griffe, which reads docstrings for the site: doctests are shown as code."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>>.*?(?=\n\n|\Z)", re.M | re.S)


class Doctests(griffe.Extension):
    """Puts a fence around every doctest."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value)
