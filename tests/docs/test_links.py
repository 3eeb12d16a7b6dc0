"""Every relative link and picture of the Markdown pages leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from repository import REPO

PAGES = sorted(
    [REPO / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "partitions/README.md")]
    + [*(REPO / "docs").rglob("*.md"), *(REPO / "benchmarks").rglob("*.md")]
)
PATHS = re.compile(r"(?<![\w/.<-])((?:benchmarks|docs|recipes|scripts|tests|partitions|fedllm)/[\w./-]*\w)(?![\w<*{])")


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchor(heading: str) -> str:
    """The name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_links(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, name = unquote(target).partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or REPO not in (file, *file.parents) or (name and name not in anchors(file)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_files_that_the_text_names(page: Path) -> None:
    """Paths from the repository's folder, in code or not; placeholders such as <task> and * are no paths."""
    named = set(PATHS.findall(page.read_text(encoding="utf-8")))
    missing = {path for path in named if "." in path.rsplit("/", 1)[-1] and not (REPO / path).exists()}
    assert missing - {"recipes/mine.yaml", "recipes/chats.yaml", "recipes/longer.yaml"} == set()


def test_every_page_is_reached_from_the_readme() -> None:
    seen, todo = set(), [REPO / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        targets = re.findall(r"\]\(([^)\s#]+\.md)", page.read_text(encoding="utf-8"))
        todo += [file for target in targets if (file := (page.parent / target).resolve()).is_file()]
    assert set((REPO / "docs").rglob("*.md")) <= seen
