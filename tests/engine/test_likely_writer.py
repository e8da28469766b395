from __future__ import annotations

import pytest

from proxy.engine.likely_writer import (
    ADVICE,
    ANY_CONTAINER,
    HINT_S,
    Evidence,
    WriterHint,
    WriterKind,
    hinted_writer,
    kubelet_sets,
    likely_writer,
)
from proxy.model.idset import CpuSet, Mask
from proxy.model.kubelet import CpuManager
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request

HINTS = {
    "": WriterKind.UNKNOWN,
    "k": WriterKind.KUBELET,
    "s": WriterKind.SYSTEMD,
    "r": WriterKind.RUNC,
}

CASES = {
    # found, saved at the runtime (- for not known), kubelet's sets, the program seen: the likely writer
    "a shell": ("0-1", "4-7", "", "", WriterKind.UNKNOWN),
    "a shell, the runtime was not asked": ("0-1", "-", "", "", WriterKind.UNKNOWN),
    "what the runtime has saved": ("0-1", "0-1", "", "", WriterKind.RUNC),
    "the runtime has reported an update": ("0-1", "-", "", "r", WriterKind.RUNC),
    "kubelet's default": ("0-15", "4-7", "0-15 2", "", WriterKind.KUBELET),
    "kubelet's set of the container": ("2", "4-7", "0-15 2", "", WriterKind.KUBELET),
    "kubelet at the runtime's own socket": ("2", "2", "0-15 2", "", WriterKind.KUBELET),
    "kubelet, by a value that it does not hold": ("3", "2", "0-15 2", "", WriterKind.UNKNOWN),
    "a reload that writes what runc wrote": ("0-1", "0-1", "", "s", WriterKind.SYSTEMD),
    "a reload that writes something else": ("0-1", "4-7", "", "s", WriterKind.SYSTEMD),
    "a reload beside kubelet": ("2", "4-7", "2", "s", WriterKind.KUBELET),
    "an update has passed, and came out otherwise": ("0-1", "4-7", "", "k", WriterKind.KUBELET),
    "an update has passed, and what was saved came back": ("0-1", "0-1", "", "k", WriterKind.RUNC),
    "no CPUs at all": ("", "-", "", "", WriterKind.UNKNOWN),
}


@pytest.mark.parametrize("case", CASES)
def test_the_container_itself(case: str) -> None:
    found, saved, kubelet, hint, writer = CASES[case]
    evidence = Evidence(
        CpuSet.parse(found),
        None if saved == "-" else CpuSet.parse(saved),
        [CpuSet.parse(text) for text in kubelet.split()],
        HINTS[hint],
    )
    assert likely_writer(evidence) is writer


@pytest.mark.parametrize(
    ("policy", "held", "default", "sets"),
    [
        ("static", {"u": {"c": "2-3"}}, "0-1", ["2-3", "0-1"]),
        ("static", {"u": {"c": "2-3"}}, "", ["2-3"]),
        ("static", {"u": {"d": "2-3"}, "v": {"c": "2-3"}}, "0-1", ["0-1"]),
        ("static", {}, "", []),
        ("none", {"u": {"c": "2-3"}}, "0-1", []),
        ("", {"u": {"c": "2-3"}}, "0-1", []),
    ],
)
def test_kubelet_writes_the_cpusets_of_its_static_policy(
    policy: str, held: dict[str, dict[str, str]], default: str, sets: list[str]
) -> None:
    its = {uid: {name: CpuSet.parse(text) for name, text in each.items()} for uid, each in held.items()}
    manager = CpuManager(policy, held=its, default=CpuSet.parse(default))
    placement = Placement(Pool.SHARED, CpuSet(), Mask((0,)))
    container = Container("id", "c", Pod("s", "u", "ns", "p"), Request(), placement, Phase.RUNNING)
    assert [str(cpus) for cpus in kubelet_sets(manager, container)] == sets


def test_each_container_has_a_next_step() -> None:
    assert set(ADVICE) == set(WriterKind)


def test_the_program_seen_most_recently_is_the_hint() -> None:
    hints = {
        "c": WriterHint(WriterKind.KUBELET, 1.0),
        ANY_CONTAINER: WriterHint(WriterKind.SYSTEMD, 2.0),
    }
    assert hinted_writer(hints, "c", 2.0 + HINT_S) is WriterKind.SYSTEMD
    assert hinted_writer(hints, "other", 2.0) is WriterKind.SYSTEMD
    assert hinted_writer(hints, "c", 2.1 + HINT_S) is WriterKind.UNKNOWN, "it was long ago"
    assert hinted_writer({**hints, "c": WriterHint(WriterKind.KUBELET, 3.0)}, "c", 4.0) is WriterKind.KUBELET
    assert hinted_writer({}, "c", 0.0) is WriterKind.UNKNOWN
