"""The report in Chromium: what it looks like in light, dark and narrow windows, and what it shows at the pointer.

Run by `make test-browser` alone, because it needs Chromium (`apt-get install chromium`).
"""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

from display.sample_report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
DARK = "--blink-settings=preferredColorScheme=0"

# Moves the pointer over every plot, then writes into the page what is found.
PROBE = """<script>
const found = {tips: [], width: document.documentElement.scrollWidth, window: innerWidth};
for (const area of document.querySelectorAll(".area")) {
  if (!area.offsetParent) continue;
  const box = area.getBoundingClientRect();
  const [clientX, clientY] = [box.left + 0.3 * box.width, box.top + 0.5 * box.height];
  area.dispatchEvent(new PointerEvent("pointermove", {clientX, clientY}));
  found.tips.push(area.querySelector(".tip").textContent);
  const tip = area.querySelector(".tip").getBoundingClientRect();
  found.outside = found.outside || tip.right > innerWidth + 1 || tip.left < 0;
  area.dispatchEvent(new PointerEvent("pointerleave"));
}
document.querySelector(".tabs input[value=exchange]").click();
found.maps = [...document.querySelectorAll(".map")].filter((map) => map.offsetParent).map((map) => map.dataset.part);
document.querySelector("button.digest").click();
found.selected = getSelection().toString();
found.background = getComputedStyle(document.body).backgroundColor;
document.body.dataset.found = JSON.stringify(found);
</script>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "run.html"
    write_report(path, 2000, 4)
    path.write_text(path.read_text().replace("</body>", PROBE + "</body>"))
    return path


def look(report, *options, width=1000):
    """What the probe has found, and the errors of the page."""
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", *options]
    command += [f"--window-size={width},900", "--virtual-time-budget=2000", "--dump-dom", report.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    errors = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(unescape(re.search(r'data-found="(.*?)"', result.stdout)[1])), errors


def test_the_pointer_shows_values_and_a_digest_can_be_copied(report):
    found, errors = look(report)
    assert errors == []
    loss, accuracy, cells, bars = found["tips"]
    assert loss == "epoch 7\ntrain 0.1250\nvalidation 0.1111"
    assert accuracy.startswith("epoch 7\ntrain ")
    assert cells == (
        "steps 600 to 603, per step\ncuda:2\ncompute  23.0 ms\nexchange 14.0 ms\nupdate   2.00 ms\ninput    0"
    )
    assert re.search(r"^exchange +1\d\.\d ms$", bars, re.M)
    assert found["maps"] == ["exchange"]
    assert found["selected"] == "0" * 64
    assert not found["outside"]


def test_light_dark_and_narrow(report):
    light, _ = look(report)
    dark, _ = look(report, DARK)
    assert light["background"] == "rgb(255, 255, 255)"
    assert dark["background"] == "rgb(20, 24, 28)"
    for width in (400, 1000):
        found, _ = look(report, width=width)
        assert found["width"] <= found["window"]  # nothing has to be scrolled sideways
        assert not found["outside"]
