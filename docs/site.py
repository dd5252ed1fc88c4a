"""Hooks of mkdocs: adds the files outside `docs` that the documents link to, with the README as the first page."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
FIRST = "index.md"
PAGES = {"README.md": FIRST}  # where a file of the repository is on the site, if elsewhere


def on_files(files: Files, config: Any) -> Files:
    """Add what is linked from pages, and from the pages that this adds."""
    added = [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"]
    for file in files.documentation_pages():
        added += _outside(f"docs/{file.src_uri}", file.content_string)
    for name in added:
        place = PAGES.get(name, name)
        if files.get_file_from_path(place) is None and (ROOT / name).is_file():
            files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
            if name.endswith(".md"):
                added += _outside(name, (ROOT / name).read_text(encoding="utf-8"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between files of the repository, as links between files of the site."""
    source = _repository_path(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        place = PAGES.get(target, target.removeprefix("docs/"))
        return posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(moved, markdown)


def _outside(source: str, markdown: str) -> list[str]:
    """Files of the repository that a page links to and that are not below `docs`."""
    folder = posixpath.dirname(source)
    targets = [posixpath.normpath(posixpath.join(folder, link)) for link in LINK.findall(markdown)]
    return [target for target in targets if not target.startswith("docs/")]


def _repository_path(page: str) -> str:
    names = {place: name for name, place in PAGES.items()}
    if page in names:
        return names[page]
    return f"docs/{page}" if (ROOT / "docs" / page).is_file() else page
