"""Takes docs/report.png: the upper part of the report of a short run in which a worker is killed.

    python benchmarks/report_picture.py              trains, and takes the picture
    python benchmarks/report_picture.py run.html     takes the picture of this report

Needs PyTorch, Chromium (`apt-get install chromium`) and Pillow, which matplotlib brings.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lockstep

PICTURE = Path(__file__).parents[1] / "docs" / "report.png"
SIZE = (900, 1010)
NUM_COLORS = 200  # of the picture, so that it is small


def record(path: Path) -> None:
    """Trains on the handwritten digits with three CPU replicas, of which one is killed."""
    from torch import manual_seed, nn, optim

    from lockstep.datasets import digits

    class KillOne(lockstep.Callback):
        """Kills a worker once."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self.trainer.num_steps == 80:
                os.kill(self.trainer.session.processes.pids[0], signal.SIGKILL)

    train, test = digits()
    manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
    net.extend([nn.Dropout(0.2), nn.Linear(256, 10)])
    sgd = optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    loss = nn.CrossEntropyLoss()
    with (
        tempfile.TemporaryDirectory() as folder,
        lockstep.wrap(net, sgd, loss, metrics=["accuracy"], devices=["cpu"] * 3, shards=6) as trainer,
    ):
        options = {"epochs": 60, "batch_size": 256, "validation_data": test, "callbacks": [KillOne()], "verbose": 0}
        trainer.fit(train, **options, checkpoint=lockstep.Checkpoint(folder, every=100), report=path)


def take(report: Path) -> None:
    """Writes the picture of a report."""
    from PIL import Image

    chromium = shutil.which("chromium") or "chromium"
    command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder, "shot.png")
        command += [f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={shot}", report.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        with Image.open(shot) as image:
            # The median cut would leave out rare colors, such as those of the marks.
            image.convert("RGB").quantize(NUM_COLORS, Image.Quantize.MAXCOVERAGE).save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size} bytes")


def main(arguments: Sequence[str]) -> None:
    """Records a report if none is given, and takes its picture."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(arguments[0] if arguments else Path(folder, "digits.html"))
        if not arguments:
            record(report)
        take(report)


if __name__ == "__main__":
    main(sys.argv[1:])
