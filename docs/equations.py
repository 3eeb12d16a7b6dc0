"""The equations of algorithms' docstrings, written for a terminal, as LaTeX in Markdown.

The notation is that of fedllm/algorithms: `x_i -= eta (g + lambda x_i)`. A docstring's lines that begin with blanks are
equations, the others are sentences with symbols in them. Code hosts render ```math blocks and $`...`$, too.
"""

from __future__ import annotations

import re

NAMES = {
    "b1": r"\beta_1", "b2": r"\beta_2", "eps": r"\varepsilon", "vhat": r"\hat v", "vbar": r"\bar v", "gh": r"\hat g",
    "mh": r"\hat m", "vh": r"\hat v", "ga": "g_a", "x0": "x_0", "floor": r"\text{floor}",
    **{name: rf"\{name}" for name in ("eta", "lambda", "alpha", "beta", "gamma", "tau", "mu", "Delta")},
}  # fmt: skip
FRACTION = r"\\frac\{(\w+)\}\{(\w+)\}"
FUNCTIONS = ("sqrt", "max", "min", "sign", "expand", "log", "exp", "cos")  # a longer one before its beginning
LETTERS = "abcdghiklmnqstuvwxyzDFGHKLNSTU"
_NAME = rf"(?:{'|'.join(NAMES)}|[{LETTERS}])(?:_(?:total|[a-z]))?'?(?![\w'])"
_TOKEN = re.compile(
    rf"\s*(\.\.|\|\||sum_\{{[^}}]*\}}|sum_[a-z]|mean_[a-z]|{'|'.join(FUNCTIONS)}|{_NAME}|\d+|[-+=/^(),])"
)
_ATOM = rf"(?:(?:{'|'.join(FUNCTIONS)})\([^()]*\)|{_NAME}|\d+)"
# In a sentence: a symbol, and what operators and single blanks join to it. `a` is left out: it is also a word.
_INLINE = re.compile(
    rf"(?<![\w'`.]){_NAME.replace('[ab', '[b')}(?:(?: ?(?:\.\.|[-+=/^]) ?){_ATOM}| {_NAME.replace('[ab', '[b')})*"
)


def rendered(page: str) -> str:
    """A Markdown page with each ```text block that follows the notation as sentences and ```math blocks."""
    return re.sub(r"```text\n(.*?)\n```", lambda found: block(found[1]), page, flags=re.DOTALL)


def block(text: str) -> str:
    """The equations of one algorithm."""
    parts: list[str] = []
    for line in text.splitlines():
        if not line.startswith(" "):
            joined = parts and not parts[-1].startswith("```")
            parts[-1:] = [f"{parts[-1]} {sentence(line)}"] if joined else [*parts[-1:], sentence(line)]
        elif parts and parts[-1].startswith("```"):
            parts[-1] = parts[-1].replace("\n\\end{align*}", f" \\\\\n{equation(line)}\n\\end{{align*}}")
        else:
            parts.append(f"```math\n\\begin{{align*}}\n{equation(line)}\n\\end{{align*}}\n```")
    return "\n\n".join(parts)


def sentence(line: str) -> str:
    """A sentence with its symbols as inline formulas; code in backticks stays."""
    pieces = re.split(r"(`[^`]*`)", line)
    return "".join(
        piece if piece.startswith("`") else _INLINE.sub(lambda found: f"$`{formula(found[0])}`$", piece)
        for piece in pieces
    )


def equation(line: str) -> str:
    """One line of equations, aligned at its first relation: `a = b,  c = d, with words`."""
    made: list[str] = []
    for number, piece in enumerate(_pieces(line)):
        found = re.fullmatch(r"(.+?) ([-+]?=) (.+)", piece)
        if found is None:
            made.append(rf"\text{{{piece}}}")
            continue
        left, sign, right = found.groups()
        relation = "&=" if number == 0 else "="
        if sign != "=":
            relation = rf"&\gets {formula(left)} {sign[0]}"
        made.append(f"{formula(left)} {relation} {words_or_formula(right)}")
    return r", \quad ".join(made)


def _pieces(line: str) -> list[str]:
    """The parts between commas outside of parentheses, or between several blanks."""
    depth, cut = 0, ""
    for letter in line.strip():
        depth += {"(": 1, ")": -1}.get(letter, 0)
        cut += "  " if letter == "," and depth == 0 else letter
    return [piece.strip() for piece in re.split(r"\s{2,}", cut) if piece.strip()]


def words_or_formula(text: str) -> str:
    """A formula, or words such as `full local gradient at x0`."""
    if re.match(r"[a-z]{3,} [a-z]{2,}", text) and not re.match(_NAME, text):
        words, _, symbol = text.rpartition(" ")
        return rf"\text{{{words} }} {formula(symbol)}"
    return formula(text)


def formula(text: str) -> str:
    """LaTeX of one expression. Raises ValueError for what is not in the notation."""
    tokens, at = [], 0
    while at < len(text.rstrip()):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"docs/equations.py: {text!r}: {text[at:]!r} is not in the notation")
        tokens.append(found[1])
        at = found.end()
    made, rest = _relation(tokens)
    if rest:
        raise ValueError(f"docs/equations.py: {text!r}: {' '.join(rest)!r} is left over")
    return made


Parsed = tuple[str, list[str]]


def _relation(tokens: list[str]) -> Parsed:
    made, tokens = _sum(tokens)
    while tokens and tokens[0] in ("=", ".."):
        sign, (right, tokens) = tokens[0], _sum(tokens[1:])
        made += rf", \dots, {right}" if sign == ".." else f" = {right}"
    return made, tokens


def _sum(tokens: list[str]) -> Parsed:
    sign = ""
    if tokens and tokens[0] == "-":
        sign, tokens = "-", tokens[1:]
    made, tokens = _product(tokens)
    made = sign + made
    while tokens and tokens[0] in ("+", "-"):
        operator, (right, tokens) = tokens[0], _product(tokens[1:])
        made += f" {operator} {right}"
    return made, tokens


def _product(tokens: list[str]) -> Parsed:
    factors: list[str] = []
    while tokens and tokens[0] not in ("+", "-", "=", "..", ")", ","):
        if tokens[0] == "/":
            below, tokens = _power(tokens[1:])
            factors[-1] = rf"\frac{{{_bare(factors[-1])}}}{{{_bare(below)}}}"
            continue
        if tokens[0] == "||" and factors and factors[-1].count("lVert") > factors[-1].count("rVert"):
            break
        factor, tokens = _power(tokens)
        factors.append(factor)
    if not factors:
        raise ValueError(f"docs/equations.py: a term is missing before {' '.join(tokens)!r}")
    return " ".join(factors), tokens


def _power(tokens: list[str]) -> Parsed:
    made, tokens = _atom(tokens)
    if tokens and tokens[0] == "^":
        exponent, tokens = _atom(tokens[1:])
        slanted = re.sub(FRACTION, r"\1/\2", _bare(exponent))
        made += f"^{{{slanted}}}"
    return made, tokens


def _atom(tokens: list[str]) -> Parsed:
    if not tokens:
        raise ValueError("docs/equations.py: an expression ends too early")
    token, tokens = tokens[0], tokens[1:]
    if token == "(":
        return _parentheses(tokens)
    if token == "||":
        return rf"\lVert {symbol(tokens[0])} \rVert", tokens[2:]
    if token in FUNCTIONS:
        inside, tokens = _parentheses(tokens[1:])
        if token == "sqrt":
            return rf"\sqrt{{{_bare(inside)}}}", tokens
        name = rf"\{token}" if token in ("max", "min") else rf"\operatorname{{{token}}}"
        return f"{name}{inside}", tokens
    if token.startswith("sum_"):
        index = token.removeprefix("sum_").strip("{}").replace(" in ", r" \in ")
        return rf"\sum_{{{index}}}", tokens
    if token.startswith("mean_"):
        return rf"\operatorname{{mean}}_{token[-1]}", tokens
    return (token if token.isdigit() else symbol(token)), tokens


def _parentheses(tokens: list[str]) -> Parsed:
    """After the opening one. A fraction alone, (1/N), needs none."""
    made, tokens = _sum(tokens)
    while tokens[:1] == [","]:
        right, tokens = _sum(tokens[1:])
        made += f", {right}"
    if tokens[:1] != [")"]:
        raise ValueError(f"docs/equations.py: a parenthesis is open at {' '.join(tokens)!r}")
    if re.fullmatch(FRACTION, made):
        return made, tokens[1:]
    return (rf"\left({made}\right)" if r"\frac" in made else f"({made})"), tokens[1:]


def _bare(made: str) -> str:
    """Without the parentheses around all of it."""
    opened = re.match(r"(\\left)?\(", made)
    if opened is None or not made.endswith(")"):
        return made
    depth = 0
    for place, letter in enumerate(made):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == ")" and depth == 0 and place < len(made) - 1:
            return made
    return made[opened.end() : -1].removesuffix(r"\right")


def symbol(name: str) -> str:
    """One name: vhat_i' is \\hat v_i'."""
    prime = "'" if name.endswith("'") else ""
    stem, _, index = name.removesuffix("'").partition("_")
    made = NAMES.get(stem, stem)
    if index:
        made += rf"_{{\text{{{index}}}}}" if len(index) > 1 else f"_{index}"
    return made + prime
