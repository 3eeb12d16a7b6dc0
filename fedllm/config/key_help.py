"""The keys of a recipe as `fedllm run --help` lists them."""

from __future__ import annotations

import dataclasses
from typing import get_type_hints

from fedllm.common.schema import describe
from fedllm.config.recipe import SECTION_TYPES


def help_text() -> str:
    """Every key of a recipe, its type, default and meaning, from the dataclasses."""
    lines = []
    for section, cls in SECTION_TYPES.items():
        lines.append(f"{section}: {(cls.__doc__ or '').splitlines()[0]}")
        defaults = cls()
        for field in dataclasses.fields(cls):
            kind = describe(get_type_hints(cls)[field.name])
            default = "null" if (value := getattr(defaults, field.name)) is None else value
            also = "".join(f"; also {section}.{alias}" for alias in field.metadata["aliases"])
            lines.append(f"  {section}.{field.name:<18} {field.metadata['help']}  [{kind}; default {default}{also}]")
        lines.append("")
    lines.append("algorithm: name, lr, server_lr, ...: see `fedllm algorithms` and `fedllm algorithms NAME`")
    lines.append("algorithms: the settings of each algorithm in this recipe; algorithm=NAME chooses one")
    lines.append("")
    lines.append("null returns a key to its default. section={...} changes the keys that it gives, and no others.")
    return "\n".join(lines)
