"""A site's own file, site.yaml: where its data, key and server are, and which recipes it allows. Needs no torch."""

from __future__ import annotations

import ipaddress
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from fedllm.algorithms import algorithm_names, canonical_name
from fedllm.common.errors import UserError
from fedllm.common.schema import build, keys, nearest, require_positive_settings, setting, without_nulls
from fedllm.config.settings import MOST_THREADS
from fedllm.config.yaml_layers import parse_yaml
from fedllm.data.table_paths import require_table
from fedllm.deployment.site_keys import require_certificate, require_private_key

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_REQUIRED = {
    "name": "a name for this site, such as hospital-a",
    "server": "the address of the server, such as 10.0.0.5:18000",
    "train": "the file with this site's training samples",
}
_PATHS = ("certificate", "key", "train", "validation", "state", "local_hub")


@dataclass(frozen=True)
class Policy:
    """What a site allows of the recipe that the server announces. null = any."""

    models: list[str] | str | None = setting(None, "names of base models, or patterns such as roberta-*")
    algorithms: list[str] | str | None = setting(None, "names of algorithms; one of a module of your own only if named")
    min_sites: int | None = setting(2, "sites that the run must have at least")
    rounds: int | None = setting(None, "rounds that the run may have at most")
    steps: int | None = setting(None, "local steps that a round may have at most")
    clip: float | None = setting(None, "largest uploads.clip; the recipe must then give one number for all vectors")

    noise: float | None = setting(
        None, "least privacy.noise, of either level; the recipe must then have privacy (and, for clients, uploads.clip)"
    )

    def __post_init__(self) -> None:
        require_positive_settings(self, "min_sites", "rounds", "steps", "clip", "noise")
        for key in ("models", "algorithms"):
            if isinstance(names := getattr(self, key), str):
                object.__setattr__(self, key, [names])
            if names is not None and not names:
                raise UserError(f"{key}: found no name, expected a list of names, or null for any")
        for name in self.algorithms or ():
            if ":" not in name and canonical_name(name) not in (known := algorithm_names()):
                raise UserError(
                    f"algorithms: unknown algorithm '{name}'{nearest(name.lower(), known)}; known: {', '.join(known)}"
                )

    def refusal(self, sections: Mapping[str, Any], sites: int) -> str | None:
        """Why this site does not take part in a run, in one sentence; None if it does. Raises nothing.

        sections: the announced recipe, as Recipe.sections gives it. sites: N, all sites of the run.
        """
        name = _given(sections, "model", "name")
        if self.models is not None and not any(fnmatchcase(str(name), pattern) for pattern in self.models):
            return f"allow.models: the recipe's model.name is {_shown(name)}, this site allows {_listed(self.models)}"
        return (
            self._algorithm_refusal(_given(sections, "algorithm", "name"))
            or self._sites_refusal(sites)
            or _excess("rounds", "federation.rounds", _given(sections, "federation", "rounds"), self.rounds)
            or self._steps_refusal(sections)
            or self._clip_refusal(_given(sections, "uploads", "clip"))
            or self._noise_refusal(_given(sections, "privacy", "noise"))
        )

    def _algorithm_refusal(self, name: Any) -> str | None:
        own = canonical_name(str(name))
        if self.algorithms is None:
            if ":" not in own:
                return None
            allowed = "no algorithm of a module that it does not name, because loading one runs its code"
        elif own in map(canonical_name, self.algorithms):
            return None
        else:
            allowed = _listed(self.algorithms)
        return f"allow.algorithms: the recipe's algorithm.name is {_shown(name)}, this site allows {allowed}"

    def _clip_refusal(self, found: Any) -> str | None:
        number = isinstance(found, int | float) and not isinstance(found, bool)
        if self.clip is None or (number and 0 < found <= self.clip):
            return None
        needed = f"this site needs one number, at most {self.clip:g}"
        return f"allow.clip: the recipe's uploads.clip is {_shown(found)}, {needed}"

    def _noise_refusal(self, found: Any) -> str | None:
        number = isinstance(found, int | float) and not isinstance(found, bool)
        if self.noise is None or (number and found >= self.noise):
            return None
        return f"allow.noise: the recipe's privacy.noise is {_shown(found)}, this site needs {self.noise:g} or more"

    def _sites_refusal(self, sites: int) -> str | None:
        if self.min_sites is None or sites >= self.min_sites:
            return None
        return f"allow.min_sites: the run has {sites} sites, this site allows {self.min_sites} or more"

    def _steps_refusal(self, sections: Mapping[str, Any]) -> str | None:
        steps, epochs = _given(sections, "local", "steps"), _given(sections, "local", "epochs")
        if self.steps is not None and steps is None:
            return (
                f"allow.steps: the recipe gives local.epochs={_shown(epochs)} and not local.steps, this site allows "
                f"{self.steps:,} or fewer"
            )
        return _excess("steps", "local.steps", steps, self.steps)


def _given(sections: Mapping[str, Any], section: str, key: str) -> Any:
    keys = sections.get(section)
    return keys.get(key) if isinstance(keys, Mapping) else None


def _excess(key: str, theirs: str, found: Any, most: int | None) -> str | None:
    if most is None or (isinstance(found, int) and not isinstance(found, bool) and found <= most):
        return None
    return f"allow.{key}: the recipe's {theirs} is {_shown(found)}, this site allows {most:,} or fewer"


def _shown(value: Any) -> str:
    """The value's repr, shortened, as the server chose it."""
    return reprlib.repr(value)


def _listed(names: list[str] | str) -> str:
    return ", ".join(names)


@dataclass(frozen=True)
class SiteSettings:
    """The keys of site.yaml. Paths are relative to the file, and absolute once `load_site` has read them."""

    name: str = setting("", "this site's name in logs: letters, digits, '.', '_', '-'")
    server: str = setting("", "address host:port of the server's SuperLink")
    certificate: Path | None = setting(None, "certificate of the federation's authority; null only where insecure")
    insecure: bool = setting(False, "no TLS: for a trial on one machine, with a loopback address alone")
    key: Path | None = setting(None, "this site's private key (ECDSA), which no one else may read")
    train: Path = setting(Path(), "the training samples: CSV, TSV, JSON lines or parquet")
    validation: Path | None = setting(None, "the validation samples; null = this site does not evaluate")
    state: Path = setting(Path("state"), "folder of what this site keeps between rounds")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto = a GPU where there is one")
    threads: int | None = setting(None, "CPU threads; null = OMP_NUM_THREADS, or all usable cores where it is not set")
    local_hub: Path | None = setting(None, "folder with models/ and datasets/; null = FEDLLM_LOCAL_HUB")
    allow: Policy = setting(Policy, "what this site allows of the recipe that the server announces")

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UserError(f"name: found '{self.name}', expected at most 64 letters, digits, '.', '_' or '-'")
        host, colon, port = self.server.rpartition(":")
        if not (colon and host and port.isdecimal() and 0 < int(port) < 65536) or "/" in host:
            raise UserError(f"server: found '{self.server}', expected host:port, such as 10.0.0.5:18000")
        if self.insecure and not _is_loopback(host):
            raise UserError(
                f"insecure: found true with server '{self.server}', expected an address of this machine, such as "
                "127.0.0.1:18000; over a network give the certificate and leave insecure out"
            )
        if not self.insecure:
            for key, what in (("certificate", "the federation's ca.crt"), ("key", "this site's private key")):
                if getattr(self, key) is None:
                    raise UserError(f"{key}: missing; expected {what}, from the server's operator, or insecure: true")
        require_positive_settings(self, "threads")
        if self.threads and self.threads > MOST_THREADS:
            raise UserError(f"threads: found {self.threads}, expected at most {MOST_THREADS}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def load_site(path: str | Path) -> SiteSettings:
    """Reads site.yaml and checks all that can be checked before anything is loaded or connected.

    Raises UserError naming the file and the key, what was found, what was expected."""
    path = Path(path)
    values = _read(path)
    for key, what in _REQUIRED.items() if values.keys() <= keys(SiteSettings).keys() else ():  # else one is misspelt
        if values.get(key) is None:
            raise UserError(f"{path}: {key}: missing; expected {what}")
    site = build(SiteSettings, without_nulls(SiteSettings, values), f"{path}: ")
    given = {key: value for key in _PATHS if (value := getattr(site, key)) is not None}
    found: dict[str, Any] = {key: (path.parent / value.expanduser()).absolute() for key, value in given.items()}
    for key, value in found.items():
        try:
            _require_path(key, value)
        except UserError as error:
            raise UserError(f"{path}: {key}: {error}") from None
    return replace(site, **found)


def _read(path: Path) -> dict[Any, Any]:
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read: {error.strerror}; expected a site's file, such as site.yaml"
        ) from error
    except ValueError as error:
        raise UserError(f"{path}: not readable as YAML: {error}") from error
    if not isinstance(values, dict):
        found = "nothing" if values is None else type(values).__name__
        raise UserError(f"{path}: found {found}, expected keys such as name: and server:")
    return values


def _require_path(key: str, path: Path) -> None:
    if key == "certificate":
        require_certificate(path)
    elif key == "key":
        require_private_key(path)
    elif key in ("train", "validation"):
        require_table(path)
    elif path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file, expected a folder")
    elif key == "local_hub" and not path.exists():
        raise UserError(f"{path}: no such folder")
