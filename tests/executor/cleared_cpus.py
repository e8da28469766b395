"""Reserve CPUs for no container, as tests need it."""

from __future__ import annotations

from typing import Any

from proxy.engine.reservation_state import Reservation, ReservationKind
from proxy.executor.reservations import ReservationRun
from proxy.model.idset import CpuSet


async def cleared(world: Any, cpus: CpuSet) -> Reservation:
    """Move containers off the CPUs that the state denies them, as at the start of an owner."""
    reservation = Reservation(ReservationKind.START, (), cpus)
    return await world.executor.reservations.carry_out(reservation, ReservationRun(""))
