"""What mkdocs can't do by itself: a folder as an entry of the navigation, and links to the programs beside the docs."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PROGRAM = "---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n````python\n{text}````\n"
LINK = re.compile(r"\]\((\.\.?/[^)#\s]+)\)")


def on_config(config: Any) -> Any:
    """Puts all pages of a folder where the navigation names the folder, and leaves out what does not exist.

    A page that is there but not in the navigation is an error, so no page gets lost by a wrong name.
    """
    config["nav"] = _entries(config["nav"])
    return config


def _entries(nav: list[Any]) -> list[Any]:
    entries: list[Any] = []
    for entry in nav:
        title, target = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
        if isinstance(target, list):
            target = _entries(target)
        elif target.endswith("/"):
            pages = sorted((DOCS / target).glob("*.md"), key=lambda page: (page.name != "index.md", page.name))
            target = [page.relative_to(DOCS).as_posix() for page in pages]
        elif not (DOCS / target).exists():
            continue
        if target:
            entries.append({title: target} if title else target)
    return entries


def on_files(files: Files, config: Any) -> Files:
    """Makes a page of each example: GitHub shows the file itself, the site the page."""
    for path in sorted((ROOT / "examples").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        content = PROGRAM.format(path=name, text=path.read_text(encoding="utf-8"))
        files.append(File.generated(config, f"source/{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Sends links that leave the docs to the page made of the file."""
    folder = posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, match[1]))
        if target.startswith("docs/") or not (ROOT / target).is_file():
            return match[0]
        return f"]({os.path.relpath(f'source/{target}.md', folder or '.')})"

    return LINK.sub(moved, markdown)
