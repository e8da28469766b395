from __future__ import annotations

from proxy.admin.prescribed import prescribed


def row(name: str, value: object, source: str = "default", problem: str = "") -> dict[str, object]:
    return {"name": name, "value": value, "source": source, "problem": problem}


def test_prescribed_values_and_those_not_followed() -> None:
    page = {
        "nodeObject": "/etc/node.json",
        "problem": "cannot read it",
        "values": [
            row("cpuBindPolicy", "FullPCPUsOnly", "label x"),
            row("numaAllocateStrategy", ""),
            row("systemCPUsExclusive", False, "annotation y"),
            row("reservedCPUs", "", problem="annotation z: bad\x1b[2J"),
        ],
    }
    assert list(prescribed(page)) == [
        "",
        "Prescribed for the node (Node object: /etc/node.json)",
        "VALUE                IN FORCE       FROM",
        "cpuBindPolicy        FullPCPUsOnly  label x",
        "systemCPUsExclusive  no             annotation y",
        "reservedCPUs         -              default",
        "  NOT FOLLOWED: cannot read it",
        "  NOT FOLLOWED: annotation z: bad [2J",
    ]


def test_nothing_to_say() -> None:
    for page in ({}, {"values": [row("cpuBindPolicy", "")]}, {"values": "x", "problem": None}):
        assert list(prescribed(page)) == []
