"""A Markdown extension of the docs site: ```math blocks and $`...`$ become MathML, which needs no script."""

from __future__ import annotations

import re
from typing import Any
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor


class Blocks(Preprocessor):
    """```math blocks. It runs before fenced code does (25)."""

    def run(self, lines: list[str]) -> list[str]:
        return re.sub(r"^```math\n(.*?)\n```$", self._drawn, "\n".join(lines), flags=re.DOTALL | re.MULTILINE).split(
            "\n"
        )

    def _drawn(self, found: re.Match[str]) -> str:
        made = f'<div class="equations">{mathml(found[1], display="block")}</div>'
        return f"\n\n{self.md.htmlStash.store(made)}\n\n"


class Inline(InlineProcessor):
    """$`...`$ in a sentence. It runs before code in backticks does (190)."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Element | str, int, int]:  # type: ignore[override]  # noqa: N802
        return self.md.htmlStash.store(mathml(m[1], display="inline")), m.start(0), m.end(0)


class Mathml(Extension):
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        md.preprocessors.register(Blocks(md), "math_blocks", 27)
        md.inlinePatterns.register(Inline(r"\$`([^`]+)`\$", md), "math_inline", 191)


def makeExtension(**options: Any) -> Mathml:  # noqa: N802
    """What Markdown calls."""
    return Mathml(**options)


def mathml(latex: str, display: str) -> str:
    """MathML without the attributes that browsers warn of."""
    return convert(latex, display=display).replace("<mi />", "")
