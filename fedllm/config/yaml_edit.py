"""Changes a few keys of a recipe's text and no other byte: comments, order, spaces and line ends stay.

ruamel.yaml keeps comments, but it writes the whole text anew and changes its spaces.
"""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from fedllm.common.errors import UserError

Scalar = int | str
_NULL = "tag:yaml.org,2002:null"


def with_keys(text: str, section: str, values: Mapping[str, Scalar], where: str) -> str:
    """The YAML text with these keys of a section set. A missing section is added at the end.

    where: the name of the file in errors. Raises UserError where the text cannot be changed without changing more.
    """
    old = yaml.safe_load(text)
    try:
        new = text
        for key, value in reversed(list(values.items())):  # each is inserted before the others
            new = _with_key(new, section, key, str(value))
        if yaml.safe_load(new) == {**old, section: {**(old.get(section) or {}), **values}}:
            return new
    except (yaml.YAMLError, TypeError):  # a change that broke the text; a section that has no keys
        pass
    wanted = ", ".join(f"{key}: {value}" for key, value in values.items())
    raise UserError(
        f"{where}: {section}: is written in a way that cannot be changed safely (an alias, a merge?); give the file a "
        f"plain section, for example {section}: {{{wanted}}}"
    )


def _with_key(text: str, section: str, key: str, value: str) -> str:
    """The text with one key set; the same text where the section is no plain mapping."""
    end_of_line = "\r\n" if "\r\n" in text else "\n"
    name, block = _entry(yaml.compose(text), section)
    if name is None or block is None:
        gap = "" if text.endswith("\n") else end_of_line
        return f"{text}{gap}{section + ':':<11} {{{key}: {value}}}{end_of_line}"
    if block.tag == _NULL and block.value:
        return f"{text[: block.start_mark.index]}{{{key}: {value}}}{text[block.end_mark.index :]}"
    if block.tag == _NULL:  # `section:` and nothing after it
        place = text.index(":", name.end_mark.index) + 1
        return f"{text[:place]} {{{key}: {value}}}{text[place:]}"
    if not isinstance(block, yaml.MappingNode):
        return text
    _, old = _entry(block, key)
    if old is not None:
        return text[: old.start_mark.index] + value + text[old.end_mark.index :]
    begin = block.start_mark.index
    if block.flow_style:
        return f"{text[: begin + 1]}{key}: {value}{', ' if block.value else ''}{text[begin + 1 :]}"
    return f"{text[:begin]}{key}: {value}{end_of_line}{' ' * block.start_mark.column}{text[begin:]}"


def _entry(mapping: yaml.Node | None, key: str) -> tuple[yaml.Node | None, yaml.Node | None]:
    """The nodes of a mapping's key and its value, with their places in the text, or (None, None)."""
    pairs = mapping.value if isinstance(mapping, yaml.MappingNode) else []
    return next(((name, value) for name, value in pairs if name.value == key), (None, None))
