"""What a reservation records in the ledger, and the record of a move, as plain data and back."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from proxy.engine.node_effects import Record
from proxy.engine.reservation_state import Reservation, ReservationKind
from proxy.model.idset import CpuSet
from proxy.model.workload import Container

MOVE = "m/"
_CREATES = (ReservationKind.CREATE, ReservationKind.NARROW)


class MoveRecord(Struct, frozen=True):
    """A move under way: the containers are on their old CPUs, on the new ones, or on both.

    Attributes:
        containers: Their ids.
        previous: The CPUs that they had.
        cpus: The CPUs that they were to have.
    """

    containers: tuple[str, ...]
    previous: CpuSet
    cpus: CpuSet

    def dump(self) -> dict[str, object]:
        """Return it as plain data."""
        previous, cpus = str(self.previous), str(self.cpus)
        return {"containers": list(self.containers), "previous": previous, "cpus": cpus}

    @classmethod
    def load(cls, data: Mapping[str, object], bounds: CpuSet) -> MoveRecord | None:
        """Read it; None where the data is none, or names CPUs that the machine does not have."""
        containers, previous, cpus = data.get("containers"), data.get("previous"), data.get("cpus")
        if not isinstance(containers, list) or not all(isinstance(each, str) for each in containers):
            return None
        if not isinstance(previous, str) or not isinstance(cpus, str):
            return None
        try:
            old, new = CpuSet.parse(previous, bounds), CpuSet.parse(cpus, bounds)
        except ValueError:
            return None
        return cls(tuple(containers), old, new) if containers and old and new else None


def records_of(
    one: Reservation, there: Mapping[str, Container], token: str, may_run_on: CpuSet
) -> dict[str, Record | None]:
    """Return what is recorded of a reservation, by key.

    Args:
        one: The reservation.
        there: Its containers that exist, as they are to be recorded.
        token: Its name.
        may_run_on: CPUs to which a move is under way; empty where none is.
    """
    if one.kind in _CREATES:
        return {f"i/{container_id}": container for container_id, container in there.items()}
    records: dict[str, Record | None] = {f"c/{key}": container for key, container in there.items()}
    if one.kind is ReservationKind.MOVE:
        move = MoveRecord(one.containers, one.previous, may_run_on)
        records[f"{MOVE}{token}"] = move.dump() if may_run_on else None
    return records
