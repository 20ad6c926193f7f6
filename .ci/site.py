"""A hook of mkdocs: README and the pages beside docs/ become part of the site, with links that hold there.

The pages link to each other, and to files of the repository, by relative paths, as one reads them in a checkout. In the
site README is the first page, what is in docs/ lies at the top, and other files keep their places.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
BESIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/*.md", "examples/**/*.md")
# Code is matched first, and left alone: `nets["critic"](x)` is no link.
LINK = re.compile(r'^```.*?^```$|`[^`\n]+`|(\]\(|src=")(?![a-z]+:|#)([^)"#]+)', re.M | re.S)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages beside docs/, and every file of the repository that a page links to."""
    for path in [path for pattern in BESIDE for path in sorted(ROOT.glob(pattern))]:
        add_file(files, config, path)
    for page in list(files.documentation_pages()):
        for path in find_targets(Path(page.abs_src_path)):
            if path.is_file() and files.get_file_from_path(place_in_site(path)) is None:
                add_file(files, config, path)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite links from paths in the repository to paths in the site."""
    path = Path(page.file.abs_src_path)
    here = posixpath.dirname(page.file.src_uri)

    def rewrite(match: re.Match[str]) -> str:
        if not match[2]:
            return match[0]
        target = resolve(path, match[2])
        return match[1] + posixpath.relpath(place_in_site(target), here or ".")

    return LINK.sub(rewrite, markdown)


def add_file(files: Any, config: Any, path: Path) -> None:
    files.append(File.generated(config, place_in_site(path), abs_src_path=str(path)))


def find_targets(page: Path) -> list[Path]:
    return [resolve(page, match[2]) for match in LINK.finditer(page.read_text(encoding="utf-8")) if match[2]]


def resolve(page: Path, target: str) -> Path:
    """Return the file that a link means: of a folder its README."""
    path = (page.parent / target).resolve()
    return path / "README.md" if path.is_dir() else path


def place_in_site(path: Path) -> str:
    """Return where a file of the repository is in the site.

    >>> place_in_site(ROOT / "README.md"), place_in_site(ROOT / "docs/input.md"), place_in_site(ROOT / "examples/a.py")
    ('index.md', 'input.md', 'examples/a.py')
    """
    name = path.relative_to(ROOT).as_posix()
    return {"README.md": "index.md"}.get(name, name.removeprefix("docs/"))
