from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.model.idset import CpuSet
from proxy.pools.write_order import CONTAINER, POD, ROOT, BeGroup, SetCpus, ordered_writes
from tests.oracles.koordinator_levels import wanted_cpus

ALL, TWO = CpuSet.parse("0-7"), CpuSet.parse("6-7")
SETS = st.builds(CpuSet.from_bits, st.integers(1, 255))


def tree(root: str, pod: str, container: str) -> list[BeGroup]:
    return [
        BeGroup("be", ROOT, CpuSet.parse(root)),
        BeGroup("be/a", POD, CpuSet.parse(pod)),
        BeGroup("be/a/x", CONTAINER, CpuSet.parse(container)),
    ]


def test_all_levels_are_narrowed_from_below() -> None:
    groups = tree("0-7", "0-7", "0-3")
    assert ordered_writes(groups, wanted_cpus(groups, TWO, ALL, static=False)) == (
        SetCpus("be/a/x", TWO),
        SetCpus("be/a", TWO),
        SetCpus("be", TWO),
    )


def test_levels_above_are_widened_first_from_the_top() -> None:
    groups = tree("0-1", "0-1", "0-1")
    wide = CpuSet.parse("0-1,6-7")
    assert ordered_writes(reversed(groups), wanted_cpus(groups, TWO, ALL, static=False)) == (
        SetCpus("be", wide),
        SetCpus("be/a", wide),
        SetCpus("be/a/x", TWO),
        SetCpus("be/a", TWO),
        SetCpus("be", TWO),
    )


def test_static_narrows_containers_only() -> None:
    groups = tree("0-1", "0-1", "0-1")
    assert ordered_writes(groups, wanted_cpus(groups, TWO, ALL, static=True)) == (
        SetCpus("be", ALL),
        SetCpus("be/a", ALL),
        SetCpus("be/a/x", TWO),
    )
    assert wanted_cpus(groups, TWO, CpuSet(), static=True) == {"be/a/x": TWO}


def test_no_writes_without_changes() -> None:
    groups = tree("0-7", "6-7", "6-7")
    assert wanted_cpus(groups, CpuSet(), ALL, static=False) == {}
    assert ordered_writes(groups, {}) == ()
    assert ordered_writes(groups, wanted_cpus(groups, TWO, ALL, static=False)) == (SetCpus("be", TWO),)
    assert ordered_writes(groups, {"be": CpuSet()}) == (), "an empty set is never written"


def test_bound_containers_and_cgroups_below_them_are_not_written() -> None:
    groups = [*tree("0-7", "0-7", "0-7"), BeGroup("be/a/x/y", CONTAINER + 1, ALL)]
    assert wanted_cpus(groups, TWO, ALL, static=False, apart=frozenset({"be/a/x"})) == {
        "be": TWO,
        "be/a": TWO,
    }


@given(SETS, SETS, SETS, SETS, SETS, st.booleans())
def test_a_group_lies_within_its_parent_at_every_moment(
    root: CpuSet, pod: CpuSet, container: CpuSet, target: CpuSet, every: CpuSet, static: bool
) -> None:
    root, pod, every = root | pod | container, pod | container, every | target
    groups = [BeGroup("be", ROOT, root), BeGroup("be/a", POD, pod), BeGroup("be/a/x", CONTAINER, container)]
    shall = wanted_cpus(groups, target, every, static=static)
    has = {group.path: group.cpus for group in groups}
    for step in ordered_writes(groups, shall):
        assert has[step.path] != step.cpus
        has[step.path] = step.cpus
        assert has["be/a/x"] <= has["be/a"] <= has["be"]
    assert has == shall
