"""What a schema module works with: cases, topologies and outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from proxy.model.idset import CpuSet
from proxy.place.cputopo import Counts, CpuTopology, Row


class BadFileError(Exception):
    """A file cannot be used; the message says which part of it and why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one case.

    Attributes:
        skipped: Why the case was not run; empty if it was.
        expected, got: What the file says and what we answered; equal when the case passed.
    """

    expected: object = None
    got: object = None
    skipped: str = ""

    @property
    def passed(self) -> bool:
        return not self.skipped and self.expected == self.got


@dataclass(frozen=True, slots=True)
class Case:
    """One case with access to its fields that names what is wrong with them."""

    index: int
    fields: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Index and, where it has one, the name: names alone are not unique."""
        name = self.fields.get("name")
        return f"case {self.index} {name!r}" if name else f"case {self.index}"

    def value(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """Give a field that must be there.

        Raises:
            BadFileError: It is missing or of another type.
        """
        if name not in self.fields:
            raise BadFileError(f"{self.label} has no {name!r}")
        value = self.fields[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise BadFileError(f"{self.label} has an unusable {name!r}: {value!r}")
        return value

    def cpus(self, name: str) -> CpuSet:
        """Give a field that holds a Linux list of CPUs."""
        text = self.value(name, str)
        try:
            return CpuSet.parse(text)
        except ValueError as error:
            raise BadFileError(f"{self.label} has an unusable {name!r}: {error}") from None


def topology(raw: Mapping[str, Any]) -> CpuTopology:
    """Build a topology from its JSON object, with the declared counts if it has any.

    Raises:
        BadFileError: A row or a count is not what the schema says.
    """
    try:
        rows = [Row(*(int(x) for x in row)) for row in raw["cpus"]]
        declared = Counts(**raw["declared"]) if raw.get("declared") is not None else None
        return CpuTopology.of_rows(rows, declared)
    except (KeyError, TypeError, ValueError) as error:
        raise BadFileError(f"topology {raw.get('name', '')!r} is unusable: {error!r}") from None


@dataclass(slots=True)
class Topologies:
    """Named topologies, built when they are first asked for."""

    raw: Mapping[str, Mapping[str, Any]]
    built: dict[str, CpuTopology] = field(default_factory=dict)

    def of(self, case: Case) -> CpuTopology:
        """Give the topology of a case, named or written out in it.

        Raises:
            BadFileError: There is none of that name.
        """
        name = case.value("topology", (str, dict))
        if isinstance(name, dict):
            return topology(name)
        if name not in self.raw:
            raise BadFileError(
                f"{case.label} wants topology {name!r}, which is in no topologies.json beside it"
            )
        if name not in self.built:
            self.built[name] = topology(self.raw[name])
        return self.built[name]
