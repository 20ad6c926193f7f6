"""The walk of one batch as docs/design/walk.md lists it, and as it is on the stack."""

import re
import sys
from pathlib import Path

import lockstep

SOURCE = Path(lockstep.__file__).parent
PAGE = Path(__file__).parents[2] / "docs/design/walk.md"
MOST = 9


def listed(framework):
    """The frames that the page lists for the framework, as (file, function)."""
    (part,) = re.findall(rf"^## {framework},.*?(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return re.findall(r"^\d+\. `([^`:]+):([^`]+)`", part, re.M)


def on_the_stack():
    """Lockstep's frames from the loop down to the caller; none in a worker, which has no loop."""
    frames = []
    frame = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(SOURCE):
            frames.append((file.relative_to(SOURCE).as_posix(), frame.f_code.co_qualname))
        if frames and frames[-1][1] == "Loop.run":
            return frames[::-1]
        frame = frame.f_back
    return []


def check(framework, frames):
    assert frames == listed(framework)
    assert len(frames) <= MOST
    folders = [str(Path(file).parent) for file, _ in frames]
    entered = [folder for folder, before in zip(folders, [None, *folders], strict=False) if folder != before]
    assert len(entered) == len(set(entered))
