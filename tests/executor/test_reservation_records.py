"""What the ledger records of reservations, and how the record of a move is read back."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.engine.reservation_state import Reservation, ReservationKind
from proxy.executor.reservation_records import MoveRecord, records_of
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request

OLD, NEW, ALL = CpuSet.parse("0-1"), CpuSet.parse("2-3"), CpuSet.parse("0-7")
MOVE = MoveRecord(("own",), OLD, NEW)
PLACED = Container(
    "own",
    "c",
    Pod("s", "u", "ns", "p"),
    Request(),
    Placement(Pool.OWN, OLD, Mask((0,))),
    Phase.RUNNING,
    0,
    "o",
)


def test_the_record_of_a_move_is_read_back() -> None:
    assert MOVE.dump() == {"containers": ["own"], "previous": "0-1", "cpus": "2-3"}
    assert MoveRecord.load(MOVE.dump(), ALL) == MOVE


@pytest.mark.parametrize(
    "change",
    [
        {"containers": []},
        {"containers": "own"},
        {"containers": [7]},
        {"previous": ""},
        {"previous": "x"},
        {"previous": 3},
        {"cpus": "9"},
        {"cpus": None},
    ],
)
def test_an_invalid_record_of_a_move_is_not_read(change: dict[str, Any]) -> None:
    assert MoveRecord.load(MOVE.dump() | change, ALL) is None


@pytest.mark.parametrize("kind", [ReservationKind.CREATE, ReservationKind.NARROW])
def test_a_create_is_recorded_as_in_flight(kind: ReservationKind) -> None:
    one = Reservation(kind, ("own",), OLD)
    assert records_of(one, {"own": PLACED}, "own", CpuSet()) == {"i/own": PLACED}


def test_a_replacement_is_recorded_with_its_containers() -> None:
    one = Reservation(ReservationKind.REPLACEMENT, ("own",), NEW)
    assert records_of(one, {"own": PLACED}, "instead-1", CpuSet()) == {"c/own": PLACED}


def test_a_move_is_recorded_until_it_is_over() -> None:
    one = Reservation(ReservationKind.MOVE, ("own",), NEW, previous=OLD)
    begun = records_of(one, {"own": PLACED}, "move-1", NEW)
    assert begun == {"c/own": PLACED, "m/move-1": MOVE.dump()}
    assert records_of(one, {"own": PLACED}, "move-1", CpuSet()) == {"c/own": PLACED, "m/move-1": None}
