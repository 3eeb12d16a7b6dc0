"""Tables as Markdown and LaTeX. The text of a cell stays text, whatever characters it has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

_MARKDOWN = str.maketrans({"&": "&amp;", "<": "&lt;", **{mark: f"\\{mark}" for mark in "\\`*[]|"}})
_LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        ">": "$>$",
        "<": "$<$",
        "[": "{[}",  # after the end of a row LaTeX takes a plain one for an option of that end
    }
)


def in_markdown(text: str) -> str:
    """The text escaped for Markdown: no HTML, no link, no end of a cell."""
    return text.translate(_MARKDOWN)


def markdown_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    words: Collection[str],
    escape: Callable[[str], str] = in_markdown,
) -> str:
    """The lines of a Markdown table. words: headings of the columns aligned left; the others hold numbers."""
    rule = ["---" if heading in words else "--:" for heading in headings]
    lines = [map(escape, headings), rule, *(map(escape, row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def latex_table(headings: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[str]) -> str:
    """A tabular for the booktabs package. words: as for `markdown_table`."""
    alignment = "".join("l" if heading in words else "r" for heading in headings)
    lines = [" & ".join(cell.translate(_LATEX) for cell in row) + r" \\" for row in [headings, *rows]]
    head = [rf"\begin{{tabular}}{{{alignment}}}", r"\toprule", lines[0], r"\midrule"]
    return "\n".join([*head, *lines[1:], r"\bottomrule", r"\end{tabular}", ""])
