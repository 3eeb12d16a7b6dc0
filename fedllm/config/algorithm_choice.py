"""Which algorithm the layers of a recipe choose, and with which settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedllm.algorithms import canonical_name, load_algorithm
from fedllm.common.errors import UserError
from fedllm.common.schema import key_aliases, keys, without_nulls


@dataclass(frozen=True)
class Choice:
    """What layers say of the algorithm.

    name: as given; None where no layer names one. own: the settings given with it. replaced: the algorithm that it
    takes the place of, if any. earlier: the settings that lower layers gave for that one.
    """

    name: str | None = None
    own: Mapping[str, Any] = field(default_factory=dict)
    replaced: str | None = None
    earlier: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, section: Any, where: str) -> Choice:
        """What one layer says. `algorithm: fedavg` is short for `algorithm: {name: fedavg}`."""
        if isinstance(section, str):
            return cls(section)
        if not isinstance(section, Mapping):
            raise UserError(f"{where}: algorithm: found {section!r}, expected keys and values")
        if "name" in section and section["name"] is None:
            raise UserError(f"{where}: algorithm.name: found None, expected an algorithm, for example fadamgc")
        name = str(section["name"]) if "name" in section else None
        return cls(name, {key: section[key] for key in section if key != "name"})

    def under(self, above: Choice) -> Choice:
        """This choice under that of a higher layer. Its settings move to `earlier` if the algorithm changes."""
        if self.name is None or above.name is None or canonical_name(self.name) == canonical_name(above.name):
            name, replaced = self.name if above.name is None else above.name, above.replaced or self.replaced
            return Choice(name, {**self.own, **above.own}, replaced, {**self.earlier, **above.earlier})
        return Choice(above.name, above.own, self.name, {**self.earlier, **self.own, **above.earlier})

    def resolve(self, table: Mapping[str, Any], where: str) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Name and every setting of the algorithm, and notes for the user.

        table: the recipe's `algorithms:`. A setting is the one given with the name, or else the one of the table, or
        else the one given for an algorithm that it replaced, or else the default. where: how errors name the recipe.
        """
        if self.name is None:
            raise UserError(f"{where}: algorithm.name: missing; expected an algorithm, for example fadamgc")
        cls = type(load_algorithm(self.name, where=f"{where}: algorithm"))
        listed = _listed(table, self.name, where)
        known = {*keys(cls), *key_aliases(cls)}
        earlier = {key: value for key, value in self.earlier.items() if key in known}
        given = without_nulls(cls, {**earlier, **listed, **self.own})
        algorithm = load_algorithm(self.name, where=f"{where}: algorithm", **given)
        filled = {key: getattr(algorithm, name) for key, name in keys(cls).items()}
        notes = self._notes([key for key in earlier if key not in {*listed, *self.own}], known)
        return {"name": canonical_name(self.name), **filled}, notes

    def _notes(self, taken: list[str], known: set[str]) -> tuple[str, ...]:
        """What became of the settings of the algorithm that was replaced, in one line."""
        dropped = [key for key in self.earlier if key not in known]
        said = [f"takes over {', '.join(taken)}"] if taken else []
        said += [f"drops {', '.join(dropped)}, which it does not have"] if dropped else []
        text = f"algorithm {canonical_name(str(self.name))} in place of {canonical_name(str(self.replaced))}"
        return (f"{text}: {'; '.join(said)}",) if said else ()


def _listed(table: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """The settings that the table has for an algorithm. Raises UserError for a mistake in any entry."""
    found: dict[str, Mapping[str, Any]] = {}
    for entry, settings in table.items():
        if not isinstance(settings, Mapping) or "name" in settings:
            raise UserError(f"{where}: algorithms.{entry}: found {settings!r}, expected settings such as {{lr: 0.1}}")
        place = f"{where}: algorithms.{entry}"
        cls = type(load_algorithm(str(entry), where=place))
        load_algorithm(str(entry), where=place, **without_nulls(cls, settings))
        if canonical_name(str(entry)) in found:
            raise UserError(f"{where}: algorithms.{entry}: is there under another name too; give one of them")
        found[canonical_name(str(entry))] = settings
    return found.get(canonical_name(name), {})
