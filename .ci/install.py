"""Build the wheel and the sdist, install the wheel into empty environments, and train there: `python .ci/install.py`.

    python .ci/install.py core torch mxnet              # extras; `core` is none of them
    python .ci/install.py --versions lowest core jax    # with the lower bounds of pyproject.toml
    python .ci/install.py --address https://… --keep dist

The project's pages link to each other by relative paths. What goes to an index needs absolute ones, and the address of
the repository, which `--address` gives: nothing in the tree names it.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).parents[1]
FRAMEWORKS = {
    "torch": "torch",
    "jax": "jax",
    "tensorflow": "tensorflow",
    "tensorflow-cpu": "tensorflow",
    "mxnet": "mxnet",
}
REPLICAS = """
import numpy as np, lockstep
from lockstep.backends.numpy import SGD, Dense
def train(devices):
    with lockstep.wrap(Dense([8, 4, 2], seed=0), SGD(0.1), "cross_entropy", devices=devices, shards=4) as trainer:
        trainer.fit((np.eye(8), np.arange(8) % 2), epochs=3, batch_size=8, verbose=0)
        return trainer.digest()
assert train(1) == train(3)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", default=["core"], help="core, torch, jax, tensorflow-cpu, mxnet")
    parser.add_argument("--versions", choices=("pinned", "newest", "lowest"), default="pinned")
    parser.add_argument("--address", default="https://example.org/lockstep", help="the repository's address")
    parser.add_argument("--keep", type=Path, help="a folder for the wheel and the sdist")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lockstep-install-") as folder:
        wheel, sdist = build(Path(folder), options.address)
        check_contents(wheel, sdist, options.address)
        for extra in options.extras:
            check_install(Path(folder, extra), wheel, extra, options.versions)
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            for path in (wheel, sdist):
                shutil.copy(path, options.keep)


def build(folder: Path, address: str) -> tuple[Path, Path]:
    """Build from a copy of the tracked files, with the repository's address in it."""
    source, python = folder / "source", create_environment(folder / "build")
    source.mkdir()
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    add_address(source, address)
    run(python, "-m", "pip", "install", "--quiet", "build")
    run(python, "-m", "build", "--outdir", folder / "dist", source)
    (wheel,), (sdist,) = (list((folder / "dist").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    return wheel, sdist


def add_address(source: Path, address: str) -> None:
    """Write the project's URLs into pyproject.toml, and absolute links into README."""
    pages = {"Homepage": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md"}
    pages |= {"Issues": "/issues", "Repository": ""}
    urls = "".join(f'{name} = "{address}{path}"\n' for name, path in pages.items())
    project = source / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    project.write_text(
        text.replace("[project.scripts]", f"[project.urls]\n{urls}\n[project.scripts]"), encoding="utf-8"
    )
    readme = source / "README.md"
    readme.write_text(make_absolute(readme.read_text(encoding="utf-8"), address), encoding="utf-8")


def make_absolute(text: str, address: str) -> str:
    """Return Markdown whose links and pictures do not depend on where it is shown.

    >>> make_absolute("[a](docs/a.md#b) ![c](docs/c.svg) [d](https://e.org) [f](#g)", "https://h")
    '[a](https://h/blob/main/docs/a.md#b) ![c](https://h/raw/main/docs/c.svg) [d](https://e.org) [f](#g)'
    """

    def replace(match: re.Match[str]) -> str:
        path = match["picture"] or match["page"]
        kind = "raw" if path.endswith((".svg", ".png")) else "blob"
        return match[0].replace(path, f"{address}/{kind}/main/{path}")

    return re.sub(r'\]\((?!\w+:|#)(?P<page>[^)]+)\)|src="(?!\w+:)(?P<picture>[^"]+)"', replace, text)


def check_contents(wheel: Path, sdist: Path, address: str) -> None:
    """Compare what is in the two with what belongs there."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = message_from_bytes(archive.read(next(name for name in names if name.endswith("/METADATA"))))
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"lockstep", "lockstep_train"}, names
    assert {"lockstep/py.typed", "lockstep/datasets/digits.npz"} <= {*names}
    assert len(metadata.get_all("Project-URL")) == 5
    relative = re.findall(r"\]\((?!https?:|#)[^)]+\)", metadata.get_payload())
    assert not relative, relative
    assert address in metadata.get_payload()
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "docs/limits.md", "examples/train.py", "tests/conftest.py"}
    assert wanted <= inside, wanted - inside
    print(f"{wheel.name}: {len(names)} files; {sdist.name}: {len(inside)} files", flush=True)


def check_install(folder: Path, wheel: Path, extra: str, versions: str) -> None:
    """Install the wheel into an empty environment, and train."""
    python = create_environment(folder)
    name = str(wheel) if extra == "core" else f"{wheel}[{extra}]"
    environment = dict(os.environ)
    if versions == "pinned":
        environment["PIP_CONSTRAINT"] = str(ROOT / ("constraints-mxnet.txt" if extra == "mxnet" else "constraints.txt"))
    bounds = list_lower_bounds(extra) if versions == "lowest" else []
    run(python, "-m", "pip", "install", "--quiet", name, *bounds, env=environment)
    command = python.parent / "lockstep"
    run(
        python,
        "-c",
        "import sys, lockstep; assert not {'torch', 'jax', 'tensorflow', 'mxnet', 'rich'} & {*sys.modules}",
    )
    run(python, "-c", REPLICAS)
    if extra == "core":
        doctor = subprocess.run([command, "doctor"], cwd=tempfile.gettempdir(), capture_output=True, text=True)
        assert doctor.returncode == 1, doctor.stderr
        assert "lockstep-train[torch]" in doctor.stdout, doctor.stdout + doctor.stderr
    else:
        run(command, "doctor")
        run(command, "verify", "--framework", FRAMEWORKS[extra], "--devices", "1,2", "--steps", "2")
    print(f"{extra}, {versions} versions, Python {sys.version.split()[0]}: installed, and trains", flush=True)


def list_lower_bounds(extra: str) -> list[str]:
    """Return the requirements of an extra (of the core, without one), at their lower bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = project["dependencies"] if extra == "core" else project["optional-dependencies"][extra]
    return [re.sub(">=", "==", each) for each in required]


def create_environment(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


def run(*command: object, env: dict[str, str] | None = None) -> None:
    """Run a command outside of the repository, whose files it is not to find."""
    subprocess.run(list(map(str, command)), cwd=tempfile.gettempdir(), check=True, env=env)


if __name__ == "__main__":
    main()
