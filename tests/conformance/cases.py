"""What a schema module works with: cases, topologies and outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from proxy.allocation.cpu_topology import Counts, CpuRow, CpuTopology
from proxy.model.idset import CpuSet

Kind = type | tuple[type, ...]


class BadFileError(Exception):
    """A file cannot be used; the message says which part of it and why."""


class BadCaseError(Exception):
    """One case cannot be used; the message says why. The other cases of its file are not affected."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one case.

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
    """One case. Access to its fields reports what is wrong with them; other fields do not matter."""

    index: int
    fields: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Index and, if the case has one, the name: names alone are not unique."""
        name = self.fields.get("name")
        return f"case {self.index} {name!r}" if name else f"case {self.index}"

    def value(self, name: str, kind: Kind) -> Any:
        """Return a field that must be there.

        Raises:
            BadCaseError: It is missing or of another type.
        """
        if name not in self.fields:
            raise BadCaseError(f"it has no {name!r}")
        value = self.fields[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise BadCaseError(f"it has an unusable {name!r}: {value!r}")
        return value

    def optional(self, name: str, kind: Kind, default: Any = None) -> Any:
        """Return a field, or the default if it is missing or null.

        Raises:
            BadCaseError: It is of another type.
        """
        return default if self.fields.get(name) is None else self.value(name, kind)

    def expected(self, name: str = "expected") -> Any:
        """Return a field with an expectation, which must be there but may be null.

        Raises:
            BadCaseError: It is missing.
        """
        return self.value(name, object)

    def cpus(self, name: str) -> CpuSet:
        """Return a field that holds a Linux list of CPUs.

        Raises:
            BadCaseError: It is missing, or is not such a list.
        """
        text = self.value(name, str)
        try:
            return CpuSet.parse(text)
        except ValueError as error:
            raise BadCaseError(f"it has an unusable {name!r}: {error}") from None


def topology(raw: Mapping[str, Any]) -> CpuTopology:
    """Build a topology from its JSON object, with the declared counts if it has any.

    Raises:
        BadFileError: A row or a count is not what the schema says.
    """
    try:
        rows = [CpuRow(*(int(x) for x in row[:5])) for row in raw["cpus"]]
        reported = raw.get("declared")
        names = ("cpus", "cores", "sockets", "numa_nodes", "uncore_caches")
        declared = (
            None if reported is None else Counts(**{name: int(reported.get(name) or 0) for name in names})
        )
        return CpuTopology.of_rows(rows, declared)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadFileError(f"topology {raw.get('name', '')!r} is unusable: {error!r}") from None


@dataclass(slots=True)
class Topologies:
    """Named topologies, built at their first use."""

    raw: Mapping[str, Mapping[str, Any]]
    built: dict[str, CpuTopology] = field(default_factory=dict)

    def of(self, case: Case) -> CpuTopology:
        """Return the topology of a case, named or written out in it.

        Raises:
            BadCaseError: There is none of that name, or it is unusable.
        """
        name = case.value("topology", (str, dict))
        try:
            if isinstance(name, dict):
                return topology(name)
            if name not in self.raw:
                raise BadCaseError(
                    f"it wants topology {name!r}, which is in no topologies.json that is known"
                )
            if name not in self.built:
                self.built[name] = topology(self.raw[name])
        except BadFileError as error:
            raise BadCaseError(str(error)) from None
        return self.built[name]
