"""Tables whose cells stay text."""

from fedllm.reporting.text_tables import latex_table, markdown_table

HEADINGS = ("run", "a_b")
ROWS = [("x|y", "1 ± 2"), ("[z] <b> & 5%", ">3")]


def test_a_markdown_table_aligns_words_left_and_numbers_right() -> None:
    assert markdown_table(HEADINGS, ROWS, words=("run",)) == (
        "| run | a_b |\n| --- | --: |\n| x\\|y | 1 ± 2 |\n| \\[z\\] &lt;b> &amp; 5% | >3 |\n"
    )


def test_a_markdown_table_of_markdown_escapes_what_it_is_told() -> None:
    rows = [("[link](#a|b)",)]
    table = markdown_table(("name",), rows, words=("name",), escape=lambda cell: cell.replace("|", r"\|"))
    assert table == "| name |\n| --- |\n| [link](#a\\|b) |\n"


def test_a_latex_table_is_a_tabular_of_booktabs() -> None:
    assert latex_table(HEADINGS, ROWS, words=("run",)) == "\n".join(
        [
            r"\begin{tabular}{lr}",
            r"\toprule",
            r"run & a\_b \\",
            r"\midrule",
            r"x|y & 1 $\pm$ 2 \\",
            r"{[}z] $<$b$>$ \& 5\% & $>$3 \\",
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )
