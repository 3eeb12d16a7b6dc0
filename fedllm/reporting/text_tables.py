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


Cells = Collection[tuple[int, int]]  # (row, column)


def in_markdown(text: str) -> str:
    """The text escaped for Markdown: no HTML, no link, no end of a cell."""
    return text.translate(_MARKDOWN)


def markdown_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    words: Collection[str],
    escape: Callable[[str], str] = in_markdown,
    bold: Cells = (),
) -> str:
    """The lines of a Markdown table. words: headings of the columns aligned left; the others hold numbers. bold: the
    cells in bold."""
    rule = ["---" if heading in words else "--:" for heading in headings]
    lines = [map(escape, headings), rule, *_cells(rows, escape, bold, "**{}**")]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def latex_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[str], bold: Cells = ()
) -> str:
    """A tabular for the booktabs package. words, bold: as for `markdown_table`."""
    alignment = "".join("l" if heading in words else "r" for heading in headings)
    cells = [map(_in_latex, headings), *_cells(rows, _in_latex, bold, r"\textbf{{{}}}")]
    lines = [" & ".join(row) + r" \\" for row in cells]
    head = [rf"\begin{{tabular}}{{{alignment}}}", r"\toprule", lines[0], r"\midrule"]
    return "\n".join([*head, *lines[1:], r"\bottomrule", r"\end{tabular}", ""])


def _in_latex(text: str) -> str:
    return text.translate(_LATEX)


def _cells(rows: Iterable[Sequence[str]], escape: Callable[[str], str], bold: Cells, mark: str) -> Iterable[list[str]]:
    for index, row in enumerate(rows):
        yield [mark.format(escape(cell)) if (index, i) in bold else escape(cell) for i, cell in enumerate(row)]
