"""The docs site: built with warnings as errors, loads nothing from elsewhere, and its colours can be read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from repository import REPO

DOCS = REPO / "docs"
IDEA = (DOCS / "images" / "idea.svg").read_text(encoding="utf-8")
MODES = [dict(re.findall(r"--(\w+):(#\w{6})", block)) for block in re.findall(r"svg\{([^}]*)\}", IDEA)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=REPO, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def articles(site: Path) -> dict[str, str]:
    """The text of each page, without the theme around it."""
    found = {}
    for path in site.rglob("*.html"):
        article = re.search(r"<article.*?</article>", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        if article is not None:
            found[path.relative_to(site).as_posix()] = article[0]
    return found


@pytest.mark.slow
def test_the_site(site: Path) -> None:
    pages = articles(site)
    assert len(pages) > len(list(DOCS.rglob("*.md")))  # and pages such as CONTRIBUTING.md
    for name, text in pages.items():
        plain = re.sub(r"<[^>]+>", "", re.sub(r"<pre.*?</pre>|<code.*?</code>", "", text, flags=re.DOTALL))
        assert "```" not in plain, name
        assert not re.search(r"\]\([^)]*\)|\$`", plain), name
    source = (DOCS / "reference" / "algorithms.md").read_text(encoding="utf-8")
    count = source.count("```math") + len(re.findall(r"\$`[^`]+`\$", source))
    assert "model:" in (site / "repository" / "recipes" / "quickstart.yaml.txt").read_text(encoding="utf-8")
    assert pages["reference/algorithms.html"].count("<math ") == count > 150


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loads = re.compile(r'<(?:script|img|iframe|source)[^>]*\ssrc="([^"]+)"|<link[^>]*\shref="([^"]+)"[^>]*>')
    for path in site.rglob("*.html"):
        found = {one or other for one, other in loads.findall(path.read_text(encoding="utf-8"))}
        assert not [target for target in found if re.match(r"(https?:)?//", target)], path
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", path.read_text(encoding="utf-8")), path


def test_every_page_is_in_the_menu() -> None:
    text = re.sub(r"!!python/\S+", "", (REPO / "mkdocs.yml").read_text(encoding="utf-8"))

    def pages(node: object) -> list[str]:
        if isinstance(node, str):
            return [node]
        children = node.values() if isinstance(node, dict) else node
        assert not isinstance(node, str)
        return [page for child in children for page in pages(child)]  # type: ignore[union-attr]

    listed = pages(yaml.safe_load(text)["nav"])
    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def luminance(colour: str) -> float:
    """Of WCAG 2: relative, of a colour #rrggbb."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_of_black_on_white() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("mode", MODES, ids=["light", "dark"])
def test_the_picture_of_the_idea_can_be_read(mode: dict[str, str]) -> None:
    """Text has at least 4.5 to 1 (WCAG AA), boxes and rows 3 to 1."""
    assert len(MODES) == 2
    assert min(contrast(mode[name], mode["paper"]) for name in ("ink", "faint")) >= 4.5
    assert min(contrast(mode[name], mode["paper"]) for name in ("c1", "c2", "c3", "c4", "x")) >= 3
    assert set(re.findall(r"var\(--(\w+)\)", IDEA)) <= set(mode)


def test_text_in_the_picture_is_large_enough_for_a_phone() -> None:
    (width,) = re.findall(r'^<svg [^>]*viewBox="0 0 (\d+) ', IDEA)
    sizes = [float(size) for size in re.findall(r"font-size:(\d+)px", IDEA)]
    assert min(sizes) * 360 / int(width) >= 8
