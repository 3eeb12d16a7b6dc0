"""Resolves names of models and data sets: a path, a local hub, or a Python package (`package:<module>`)."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Literal

from fedllm.common.errors import UserError

Kind = Literal["models", "datasets"]
PACKAGE = "package:"


class NotFoundError(UserError):
    """A model or a data set that is neither on this machine nor on the hub."""


def package_path(name: str) -> Path:
    """The folder of `package:<module>[/sub/folder]`. The module is located without running its code.

    Raises NotFoundError if the package is not installed or the folder is not in it.
    """
    module, _, inside = name.removeprefix(PACKAGE).partition("/")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise NotFoundError(
            f"{name}: the Python package '{module}' is not installed; run: pip install {module.replace('_', '-')}"
        )
    root = Path(next(iter(spec.submodule_search_locations))).resolve()
    path = (root / inside).resolve()
    if not path.is_relative_to(root) or not path.exists():
        raise NotFoundError(f"{name}: package '{module}' is installed in {root}, but holds no '{inside}'")
    return path


def local_hub(setting: str | None = None) -> Path | None:
    """The local hub: `run.local_hub` if given, else FEDLLM_LOCAL_HUB, else None. UserError if it is no folder."""
    value = setting or os.environ.get("FEDLLM_LOCAL_HUB")
    if not value:
        return None
    path = Path(value).expanduser()
    if not path.is_dir():
        source = "run.local_hub" if setting else "FEDLLM_LOCAL_HUB"
        raise UserError(f"{source}={value}: no such folder (a local hub holds models/<name>/ and datasets/<name>/)")
    return path


def find_local(kind: Kind, name: str, hub: str | None = None) -> Path | None:
    """The folder or file of `name` on this machine, or None if only the Hugging Face cache or hub can have it.

    Order: `package:` names, an existing path, then `<local hub>/<kind>/<name>`.
    """
    if name.startswith(PACKAGE):
        return package_path(name)
    if not is_hub_name(name):
        return Path(name).expanduser()
    if (root := local_hub(hub)) and (path := root / kind / name).exists():
        return path
    return None


def is_hub_name(name: str) -> bool:
    """Whether a name is one of the hub, or of a local hub, and neither a path nor in a package."""
    return not name.startswith(PACKAGE) and not Path(name).expanduser().exists()


def not_found(kind: Kind, name: str, hub: str | None, cause: BaseException | str) -> NotFoundError:
    """The error for a name that was not found. It lists every place that was searched."""
    root = local_hub(hub)
    noun = "model" if kind == "models" else "data set"
    local = f"{root / kind / name}" if root else "no local hub set (FEDLLM_LOCAL_HUB or run.local_hub)"
    reason = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
    return NotFoundError(
        f"{noun} '{name}' was found nowhere. Looked for:\n"
        f"  1. a path: {Path(name).expanduser().absolute()}\n"
        f"  2. the local hub: {local}\n"
        f"  3. the Hugging Face cache, then the hub: {reason}\n"
        f"Check the name, name a folder, or use package:<module> for one inside a Python package."
    )
