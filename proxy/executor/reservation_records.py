"""The ledger's records of reservations: creates in flight, placements, and moves of owners under way.

The records are written before the barrier of a reservation (``proxy.engine.reservation``). The next daemon
reads the record of a move to find that it has to be reverted.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from proxy.engine.node_effects import Record
from proxy.engine.reservation_state import Reservation, ReservationKind
from proxy.model.idset import CpuSet
from proxy.model.workload import CONTAINER_RECORD, CREATE_RECORD, Container

MOVE_RECORD = "m/"
_CREATES = (ReservationKind.CREATE, ReservationKind.NARROW)


class MoveRecord(Struct, frozen=True):
    """A move under way: the containers are on their old CPUs, on the new ones, or on both.

    Attributes:
        containers: Their ids.
        previous: The CPUs that they had.
        cpus: The CPUs to which they were moving.
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
        """Read a record; None if the data is not one, or names CPUs that the machine does not have."""
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
    reservation: Reservation, containers: Mapping[str, Container], token: str, may_run_on: CpuSet
) -> dict[str, Record | None]:
    """Return the records of a reservation, by key.

    Args:
        reservation: The reservation.
        containers: Its existing containers, as they should be recorded.
        token: Its name.
        may_run_on: CPUs to which a move is under way; empty if none is.
    """
    if reservation.kind in _CREATES:
        return {CREATE_RECORD + container_id: container for container_id, container in containers.items()}
    records: dict[str, Record | None] = {
        CONTAINER_RECORD + container_id: container for container_id, container in containers.items()
    }
    if reservation.kind is ReservationKind.MOVE:
        move = MoveRecord(reservation.containers, reservation.previous, may_run_on)
        records[f"{MOVE_RECORD}{token}"] = move.dump() if may_run_on else None
    return records
