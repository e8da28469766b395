"""The page about memory placement, for users."""

from __future__ import annotations

import pytest

from proxy.admin.status_tables import MEMORY_HEADER, memory_remark, memory_rows

MIB = 1 << 20


def test_a_row_for_each_node() -> None:
    entry = {"ref": "ns/db/c", "decided": "0", "nodes": "0", "outside": 2 * MIB, "outsideFile": 9}
    entry |= {"anon": {"0": 3 * MIB, "1": 2 * MIB}, "file": {"10": 9}, "huge": {}, "migrates": False}
    assert memory_rows({"containers": [entry]}) == [
        MEMORY_HEADER,
        (
            *("ns/db/c", "0", "0", "0", "3.0 MiB", "0", "0"),
            (
                "2.0 MiB elsewhere; 9 B of page cache elsewhere, where it was read first; "
                "the kernel does not move it (memory_migrate is 0)"
            ),
        ),
        ("", "", "", "1", "2.0 MiB", "0", "0", ""),
        ("", "", "", "10", "0", "9 B", "0", ""),
    ]


@pytest.mark.parametrize(
    ("firm", "cache", "moves", "message"),
    [
        (0, 0, False, "all there"),
        (0, 5, False, "5 B of page cache elsewhere, where it was read first"),
        (MIB, 0, True, "1.0 MiB elsewhere"),
        (None, 0, True, ""),
    ],
)
def test_the_verdict_names_the_memory_that_is_elsewhere(
    firm: object, cache: int, moves: bool, message: str
) -> None:
    assert memory_remark({"outside": firm, "outsideFile": cache, "migrates": moves}) == message


def test_values_that_cannot_be_determined() -> None:
    rows = memory_rows({"containers": [{"ref": "a", "problem": "cannot read it"}, {}, 3]})
    assert rows[1:] == [
        ("a", "-", "", "-", "-", "-", "-", "cannot read it"),
        ("", "-", "", "-", "0", "0", "0", ""),
    ]
    assert memory_rows([]) == memory_rows({"containers": 1}) == [MEMORY_HEADER]
