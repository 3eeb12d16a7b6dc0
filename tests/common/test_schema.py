"""Plain data become dataclasses: what is taken as which type, and how a mistake is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest

from fedllm.common.errors import UserError
from fedllm.common.schema import build, describe, key_aliases, keys, nearest, setting, without_nulls


class Scale:
    """A class that nothing but its own objects is taken for."""


SMALL, LARGE = Scale(), Scale()


@dataclass(frozen=True)
class Inner:
    """A section in a section."""

    rate: float = setting(1.0, "a rate")

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise UserError(f"rate: found {self.rate}, expected 0 or more")


@dataclass(frozen=True)
class Section:
    """One field of every kind."""

    whole: int = setting(0)
    number: float = setting(0.0)
    flag: bool = setting(False)
    text: str | None = setting(None)
    size: int | Literal["auto"] = setting("auto", aliases=("extent", "width"))
    kind: Literal["a", "b"] = setting("a")
    words: list[str] = setting([])
    pair: tuple[float, float] = setting((0.0, 0.0))
    targets: dict[str, float] | None = setting(None)
    inner: Inner = setting(Inner, key="section")
    maybe: Inner | None = setting(None)
    any: Any = setting(None)
    own: Scale = setting(SMALL)


def built(key: str, value: object) -> Any:
    section = build(Section, {key: value}, "x.yaml: part.")
    return getattr(section, keys(Section)[key])


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("whole", 7, 7),
        ("whole", 7.0, 7),
        ("whole", "7", 7),
        ("whole", np.int64(7), 7),
        ("whole", 2**80 + 1, 2**80 + 1),
        ("number", 3, 3.0),
        ("number", "3e-4", 3e-4),
        ("number", np.float32(0.5), 0.5),
        ("flag", True, True),
        ("text", None, None),
        ("text", "7", "7"),
        ("size", "auto", "auto"),
        ("size", "4", 4),
        ("words", ("a", "b"), ["a", "b"]),
        ("pair", [0.5, "1e-1"], (0.5, 0.1)),
        ("targets", {"f1": "0.5"}, {"f1": 0.5}),
        ("section", {"rate": 2}, Inner(2.0)),
        ("maybe", None, None),
        ("maybe", {"rate": 2}, Inner(2.0)),
        ("any", {"x": [1]}, {"x": [1]}),
        ("own", LARGE, LARGE),
    ],
)
def test_what_is_taken(key: str, value: object, expected: object) -> None:
    found = built(key, value)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("whole", True, "x.yaml: part.whole: found True, expected a whole number"),
        ("whole", 2.5, "part.whole: found 2.5, expected a whole number"),
        ("whole", "1e3", "part.whole: found '1e3', expected a whole number"),
        ("whole", float("inf"), "part.whole: found inf, expected a whole number"),
        ("number", False, "part.number: found False, expected a number"),
        ("number", "fast", "part.number: found 'fast', expected a number"),
        ("number", float("nan"), "part.number: found nan, expected a number"),
        ("number", "inf", "part.number: found 'inf', expected a number"),
        ("number", 10**400, "expected a number"),
        ("flag", 1, "part.flag: found 1, expected true or false"),
        ("flag", "yes", "part.flag: found 'yes', expected true or false"),
        ("text", 7, "part.text: found 7, expected text or null"),
        ("size", True, "part.size: found True, expected a whole number or one of: auto"),
        ("size", "large", "part.size: found 'large', expected a whole number or one of: auto"),
        ("kind", "c", "part.kind: found 'c', expected one of: a, b"),
        ("words", "ab", "part.words: found 'ab', expected a list of texts"),
        ("words", [1], "part.words: found [1], expected a list of texts"),
        ("pair", [1], "part.pair: found [1], expected a list of 2 numbers"),
        ("pair", [True, 1], "part.pair: found [True, 1], expected a list of 2 numbers"),
        ("targets", {"f1": True}, "part.targets: found {'f1': True}, expected a mapping of text to a number or null"),
        ("targets", {1: 0.5}, "part.targets: found {1: 0.5}, expected a mapping of text to a number or null"),
        ("section", 3, "part.section: found 3, expected keys and values"),
        ("section", None, "part.section: found None, expected keys and values"),
        ("section", {"rte": 1}, "part.section.rte: unknown key (did you mean 'rate'?); known keys: rate"),
        ("section", {"rate": -1}, "part.section.rate: found -1.0, expected 0 or more"),
        ("maybe", [], "part.maybe: found [], expected keys and values"),
        ("own", 0.5, "part.own: found 0.5, expected Scale"),
        ("wole", 1, "part.wole: unknown key (did you mean 'whole'?); known keys: whole, number, flag"),
        ("inner", {}, "part.inner: unknown key"),
    ],
)
def test_what_is_refused(key: str, value: object, said: str) -> None:
    with pytest.raises(UserError) as error:
        build(Section, {key: value}, "x.yaml: part.")
    assert said in str(error.value)


def test_other_names_of_a_key() -> None:
    assert key_aliases(Section) == {"extent": "size", "width": "size"}
    assert built_size(extent=3) == built_size(width=3) == built_size(size=3) == built_size(size=3, extent=3) == 3
    with pytest.raises(UserError, match=r"extent: found 3, but size is 4: they are one setting; give size alone"):
        built_size(extent=3, size=4)
    with pytest.raises(UserError, match=r"extent: found 'big', expected a whole number or one of: auto"):
        built_size(extent="big")


def built_size(**values: object) -> object:
    return build(Section, values, "").size


def test_a_type_in_words() -> None:
    assert describe(list[int]) == "a list of whole numbers"
    assert describe(tuple[float, ...]) == "a list of numbers"
    assert describe(tuple[float, float]) == "a list of 2 numbers"
    assert describe(list[Literal["a", "b"]]) == "a list of any of: a, b"


def test_a_null_is_left_out_where_the_key_takes_none() -> None:
    values = dict.fromkeys(["whole", "width", "section", "text", "targets", "maybe", "any", "wole"])
    assert set(without_nulls(Section, values)) == {"text", "targets", "maybe", "any", "wole"}
    assert without_nulls(Section, {"whole": 0, "flag": False}) == {"whole": 0, "flag": False}


def test_a_name_that_is_less_alike_than_asked_for_is_not_proposed() -> None:
    assert nearest("fedyogi", ["fedit"]) == " (did you mean 'fedit'?)"
    assert nearest("fedyogi", ["fedit"], 0.8) == ""
