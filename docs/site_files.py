"""Hooks of mkdocs.yml: links from docs/ to other files of the repository work on the site too.

A page such as CONTRIBUTING.md becomes a page below repository/. A picture is copied. Any other file is copied as text.
A link to a folder becomes its text alone.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = "docs/"
ELSEWHERE = "repository/"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", flags=re.DOTALL | re.MULTILINE)
PICTURES = (".png", ".svg")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what the pages link to, and what these pages link to."""
    todo = [DOCS + file.src_uri for file in files.documentation_pages()]
    seen = set(todo)
    while todo:
        page = todo.pop()
        for name in linked(page) - seen:
            seen.add(name)
            if not name.startswith(DOCS):
                files.append(File.generated(config, site_path(name), abs_src_path=str(REPOSITORY / name)))
            if name.endswith(".md"):
                todo.append(name)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = page.file.src_uri
    name = source.removeprefix(ELSEWHERE) if source.startswith(ELSEWHERE) else DOCS + source

    def link(found: re.Match[str]) -> str:
        picture, text, target = found.groups()
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or not path:
            return found[0]
        file = resolved(name, path)
        if (REPOSITORY / file).is_dir():
            return text
        to = relpath(site_path(file), str(PurePosixPath(source).parent))
        return f"{picture}[{text}]({to}{'#' * bool(anchor)}{anchor})"

    parked: list[str] = []

    def park(found: re.Match[str]) -> str:
        parked.append(found[0])
        return f"\x00{len(parked) - 1}\x00"

    made = LINK.sub(link, CODE.sub(park, markdown))
    return re.sub("\x00(\\d+)\x00", lambda found: parked[int(found[1])], made)


def linked(page: str) -> set[str]:
    """The files of the repository that a page links to, as paths from its folder."""
    text = CODE.sub("", (REPOSITORY / page).read_text(encoding="utf-8"))
    targets = (target.partition("#")[0] for _, _, target in LINK.findall(text) if not re.match(r"[a-z]+:", target))
    found = {resolved(page, path) for path in targets if path}
    return {name for name in found if (REPOSITORY / name).is_file()}


def resolved(page: str, path: str) -> str:
    """A relative link of a page as a path from the repository's folder."""
    return normpath(str(PurePosixPath(page).parent / path))


def site_path(name: str) -> str:
    """Where a file of the repository is on the site."""
    if name.startswith(DOCS):
        return name.removeprefix(DOCS)
    shown = name.endswith((".md", *PICTURES))
    return ELSEWHERE + (name if shown else f"{name}.txt")
