from __future__ import annotations

from proxy.model.idset import CpuSet
from proxy.model.machine import Machine
from proxy.topology.description import machine_from_json
from proxy.topology.picture import render
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy


def draw(machine: Machine, **options) -> list[str]:
    return render(machine, **options).splitlines()


def test_small_machine_in_one_part() -> None:
    assert draw(regular_machine(1, 1, 2, 2, 4 << 30, sibling_offset=False)) == [
        "1 socket, 1 NUMA node, 2 cores, 4 CPUs, 2 threads per core, 4 GiB",
        "└─ socket 0 · node 0 4 GiB · L3 32 MiB  CPUs 0-3",
        "   [0 1] [2 3]  2 cores",
    ]


def test_sockets_nodes_and_distances() -> None:
    assert draw(regular_machine(2, 2, 8, 2, 64 << 30)) == [
        "2 sockets, 4 NUMA nodes, 32 cores, 64 CPUs, 2 threads per core, 256 GiB",
        "├─ socket 0  CPUs 0-15,32-47",
        "│  ├─ node 0 64 GiB · L3 32 MiB  CPUs 0-7,32-39",
        "│  │  [0 32] [1 33] … [7 39]  8 cores",
        "│  └─ node 1 64 GiB · L3 32 MiB  CPUs 8-15,40-47",
        "│     [8 40] [9 41] … [15 47]  8 cores",
        "└─ socket 1  CPUs 16-31,48-63",
        "   ├─ node 2 64 GiB · L3 32 MiB  CPUs 16-23,48-55",
        "   │  [16 48] [17 49] … [23 55]  8 cores",
        "   └─ node 3 64 GiB · L3 32 MiB  CPUs 24-31,56-63",
        "      [24 56] [25 57] … [31 63]  8 cores",
        "distances    0  1  2  3",
        "  node 0    10 12 21 21",
        "  node 1    12 10 21 21",
        "  node 2    21 21 10 12",
        "  node 3    21 21 12 10",
    ]


def test_owners_are_drawn_in_columns_of_cores_and_rows_of_threads() -> None:
    owners = {1: "A", 21: "A", 2: "B"}
    lines = draw(regular_machine(1, 1, 20, 2), owner=lambda cpu: owners.get(cpu, "·"))
    assert lines[2:] == [
        "   0-19            ·AB····· ········ ····",
        "   20-39           ·A······ ········ ····",
    ]


def test_long_tags_keep_their_columns_and_paint_changes_no_width() -> None:
    machine = regular_machine(1, 1, 3, 1)
    lines = draw(machine, owner=lambda cpu: "BE" if cpu else "x", paint=lambda tag: f"<{tag}>")
    assert lines[2] == "   0-2             <x > <BE> <BE>"


def test_narrow_terminals_wrap_strips() -> None:
    lines = draw(regular_machine(1, 1, 20, 1), owner=lambda cpu: "o", width=40)
    assert [line.split() for line in lines[2:]] == [
        ["0-15", "oooooooo", "oooooooo"],
        ["16-19", "oooo"],
    ]


def test_an_ascii_picture_has_only_ascii_characters() -> None:
    text = render(regular_machine(2, 2, 8, 2), owner=lambda cpu: "·", ascii=True)
    assert text.isascii()
    assert "|- node 0" in text
    assert "`- node 1" in text
    assert "........" in text
    assert "?" not in text


def test_identical_parts_are_drawn_once_in_long_pictures() -> None:
    machine = regular_machine(8, 4, 8, 2)
    assert draw(machine)[:4] == [
        "8 sockets, 32 NUMA nodes, 256 cores, 512 CPUs, 2 threads per core, 2 TiB",
        "├─ socket 0  CPUs 0-31,256-287",
        "│  ├─ node 0 64 GiB · L3 32 MiB  CPUs 0-7,256-263",
        "│  │  [0 256] [1 257] … [7 263]  8 cores",
    ]
    assert draw(machine)[4:6] == [
        "│  └─ nodes 1 to 3: each alike  CPUs 8-31,264-287",
        "└─ sockets 1 to 7: each alike  CPUs 32-255,288-511",
    ]
    lines = draw(machine, owner=lambda cpu: "A" if cpu == 300 else "·")
    assert sum("A" in line for line in lines[1:]) == 1
    assert any(line.startswith("├─ socket 1  CPUs 32-63") for line in lines)
    assert any("sockets 3 to 7: each alike" in line for line in lines)


def test_wide_distance_tables_become_lists() -> None:
    lines = draw(regular_machine(8, 4, 1, 1))
    assert "  node 4: 10 to 4, 12 to 5-7, 21 to 0-3,8-31" in lines
    assert "distances:" in lines


def hybrid() -> Machine:
    rows = [[0, 0], [1, 0], [2, 2], [3, 2], [4, 4], [5, 5], [6, 6]]
    data = {
        "cpu_columns": ["cpu", "core", "package", "cluster"],
        "cpu_rows": [[cpu, core, 0, 4 if core >= 4 else core] for cpu, core in rows],
        "cpus": {"present": "0-8", "isolated": "6"},
        "kinds": {
            "device": {"cpu_core": "0-3", "cpu_atom": "4-6"},
            "max_freq_khz": {"5000000": "0-1", "5200000": "2-3", "3900000": "4-6"},
        },
    }
    return machine_from_json(data)


def test_hybrid_isolated_and_offline_cpus_are_marked() -> None:
    assert draw(hybrid()) == [
        "1 socket, 5 cores, 7 CPUs, 1 or 2 threads per core",
        "└─ socket 0 · node 0 (assumed) memory unknown  CPUs 0-6",
        "   [0 1] [2 3]  2 cores, 5-5.2 GHz, cpu_core",
        "   [4] [5]  2 cores, 3.9 GHz, cpu_atom",
        "   [6]  1 core, 3.9 GHz, cpu_atom, isolated",
        "offline: CPUs 7-8",
        "isolated: CPU 6",
    ]
    assert draw(hybrid(), owner=lambda cpu: "o")[2:4] == [
        "   0,2,4-6         ooooo",
        "   1,3             oo",
    ]


def nodes(*spec: tuple[str, int | None, list[int]]) -> Machine:
    reported = [{"id": i, "cpus": c, "mem_bytes": m, "distance": d} for i, (c, m, d) in enumerate(spec)]
    node_of = {cpu: i for i, (c, _, _) in enumerate(spec) for cpu in CpuSet.parse(c)}
    rows = [[cpu, cpu, 0, node] for cpu, node in sorted(node_of.items())]
    return machine_from_json(
        {"cpu_columns": ["cpu", "core", "package", "numa"], "cpu_rows": rows, "numa": {"nodes": reported}}
    )


def test_nodes_without_cpus_and_without_memory() -> None:
    gib = 1 << 30
    lines = draw(
        nodes(
            ("0-1", gib, [10, 20, 30, 40, 50]),
            ("2-3", 0, [20, 10, 40, 30, 50]),
            ("", 2 * gib, [30, 40, 10, 60, 50]),
            ("", 2 * gib, [40, 30, 60, 10, 50]),
            ("", 0, [50, 50, 50, 50, 10]),
        )
    )
    assert "   ├─ node 0 1 GiB  CPUs 0-1" in lines
    assert "   └─ node 1 no memory  CPUs 2-3" in lines
    assert lines[6:] == [
        "memory only: node 2 2 GiB, nearest to node 0 at 30",
        "memory only: node 3 2 GiB, nearest to node 1 at 30",
        "no CPUs, no memory: node 4",
        "distances    0  1  2  3",
        "  node 0    10 20 30 40",
        "  node 1    20 10 40 30",
        "  node 2    30 40 10 60",
        "  node 3    40 30 60 10",
    ]


def test_parts_that_overlap_other_parts_are_listed_below() -> None:
    machine = nodes(("0-1", 1, [10, 20]), ("2-3", 1, [20, 10]))
    crossing = changed_copy(
        machine, cpus=tuple(changed_copy(c, package=0 if c.id in (0, 2) else 1) for c in machine.cpus)
    )
    lines = draw(crossing)
    assert "node 0 1 B: CPUs 0-1, across the parts above" in lines
    assert "distances: 10 within a node, 20 between nodes" in lines


def test_cpus_in_no_inner_part_are_still_drawn() -> None:
    data = {
        "cpu_columns": ["cpu", "core", "package", "numa"],
        "cpu_rows": [[0, 0, 0, 0], [1, 1, 0, None]],
        "numa": {"nodes": [{"id": 0, "cpus": "0", "mem_bytes": 1}]},
    }
    assert draw(machine_from_json(data))[1:] == [
        "└─ socket 0  CPUs 0-1",
        "   ├─ node 0 1 B  CPU 0",
        "   │  [0]  1 core",
        "   └─ others  CPU 1",
        "      [1]  1 core",
    ]


def test_small_caches_are_not_drawn() -> None:
    machine = regular_machine(1, 1, 2, 1)
    small = {name: changed_copy(cache, level=2) for name, cache in machine.caches.items()}
    assert "L2" not in render(changed_copy(machine, caches=small))
