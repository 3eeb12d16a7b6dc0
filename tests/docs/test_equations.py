"""The equations of docstrings as LaTeX, and their MathML on the site."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from repository import REPO

from docs import equations
from fedllm.algorithms import algorithm_names
from fedllm.cli.algorithm_entries import entry

PAGE = (REPO / "docs/reference/algorithms.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("m = b1 m + (1-b1) g", r"m &= \beta_1 m + (1 - \beta_1) g"),
        ("x += eta_g D", r"x &\gets x + \eta_g D"),
        ("vhat = max(vhat, v, floor)", r"\hat v &= \max(\hat v, v, \text{floor})"),
        ("y_i' = y_i - y + (x - x_i)/(K eta)", r"y_i' &= y_i - y + \frac{x - x_i}{K \eta}"),
        ("y += (1/N) sum_{i in T} (y_i' - y_i)", r"y &\gets y + \frac{1}{N} \sum_{i \in T} (y_i' - y_i)"),
        ("Delta = -D/(K eta)", r"\Delta &= -\frac{D}{K \eta}"),
        ("u = b1^k", r"u &= \beta_1^{k}"),
        ("eta = 1/(K (S K T_total)^(1/4))", r"\eta &= \frac{1}{K (S K T_{\text{total}})^{1/4}}"),
        (
            "c_i' = (1/K) sum_k g, of the raw gradients",
            r"c_i' &= \frac{1}{K} \sum_{k} g, \quad \text{of the raw gradients}",
        ),
        ("y_i = full local gradient at x0", r"y_i &= \text{full local gradient at } x_0"),
        (
            "x_i -= eta (m/(sqrt(vhat)+eps) + lambda x_i)",
            r"x_i &\gets x_i - \eta \left(\frac{m}{\sqrt{\hat v} + \varepsilon} + \lambda x_i\right)",
        ),
    ],
)
def test_a_line(text: str, latex: str) -> None:
    assert equations.equation(text) == latex


def test_a_sentence_keeps_words_and_code() -> None:
    text = "With `form: y` a client keeps y_i, 0 at the start. For k = 1..K, with t' = t K + k:"
    assert equations.sentence(text) == (
        "With `form: y` a client keeps $`y_i`$, 0 at the start. For $`k = 1, \\dots, K`$, with $`t' = t K + k`$:"
    )


@pytest.mark.parametrize("text", ["x = p", "x = (1-b1", "x = y +", "x = y)"])
def test_what_is_not_in_the_notation_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"docs/equations\.py"):
        equations.equation(text)


@pytest.mark.parametrize("name", algorithm_names())
def test_every_equation_of_an_algorithm_is_on_the_page(name: str) -> None:
    section = PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]
    lines = [line for line in entry(name).equations.splitlines() if line.startswith(" ")]
    shown = "\n".join(re.findall(r"```math\n\\begin{align\*}\n(.*?)\n\\end{align\*}\n```", section, flags=re.DOTALL))
    assert shown.split("\n") == [
        line if shown.split("\n")[place] == line else f"{line} \\\\"
        for place, line in enumerate(map(equations.equation, lines))
    ]
    assert "```text" not in section


def test_the_formulas_of_the_page_become_mathml() -> None:
    """Every symbol is drawn: no backslash and no name of a command is left."""
    mathml = pytest.importorskip("docs.mathml")
    for latex in {*re.findall(r"```math\n(.*?)\n```", PAGE, flags=re.DOTALL), *re.findall(r"\$`([^`]+)`\$", PAGE)}:
        tree = ElementTree.fromstring(mathml.mathml(latex, "block"))
        text = "".join(tree.itertext())
        assert "\\" not in text
        assert "&" not in text
        assert not re.search("gets|frac|beta|hat|left|operatorname", text)
