from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.model.idset import CpuSet
from proxy.model.koordinator import SuppressMode
from proxy.model.workload import KubeQos, QosClass
from proxy.pools.be_suppression import Usage, be_cpus, budget, choose_cpus, cpu_count_for, is_be, quota_for
from proxy.pools.cpu_location import CpuLocation
from proxy.pools.published_pools import AnnotatedCpus, Withheld
from tests.oracles.koordinator_suppress import ModeStatus, ModeStatuses, suppression_round

LOCATIONS = [CpuLocation(cpu, cpu % 4, cpu % 4 // 2, cpu % 4 // 2) for cpu in range(8)]
SETS = st.builds(CpuSet.from_bits, st.integers(0, 255))
HELD = st.lists(st.builds(AnnotatedCpus, st.sampled_from(QosClass), SETS), max_size=3)
WITHHELD = st.builds(Withheld, SETS, SETS, SETS)


def test_be_by_label_or_by_class() -> None:
    assert is_be(QosClass.BE, KubeQos.BURSTABLE)
    assert is_be(QosClass.LS, KubeQos.BEST_EFFORT)
    assert not is_be(QosClass.NONE, KubeQos.BURSTABLE)


def test_be_gets_the_cpus_that_other_pods_leave() -> None:
    usage = Usage(20_000, 19_000, 8.5, 500, {"x": 4.0, "y": 2.0, "z": 1.0}, frozenset("y"))
    # x and z are counted, and 1.5 CPUs of the system: more than the 1 that kubelet keeps back.
    assert budget(usage) == 13_000 - 5_000 - 1_500
    assert budget(usage, 40, 25) == 5_000


def test_the_reserve_counts_if_the_system_uses_less() -> None:
    def left(allocatable: int, reservation: int) -> int:
        return budget(Usage(20_000, allocatable, 7.0, reservation, {"x": 6.0}, frozenset()))

    assert left(20_000, 0) == 13_000 - 6_000 - 1_000, "the usage of the system is subtracted"
    assert left(18_000, 500) == 13_000 - 6_000 - 2_000, "the reserve of kubelet is subtracted"
    assert left(18_000, 3_000) == 13_000 - 6_000 - 3_000, "the reservation is subtracted"


def test_a_node_without_a_reserve_gives_all_remaining_cpus() -> None:
    assert budget(Usage(20_000, 20_000, 6.0, pods={"x": 6.0})) == 13_000 - 6_000


EIGHTHS = st.integers(0, 200).map(lambda eighths: eighths * 125)
"""Milli-CPUs that are exact as a fraction of two, as usage is given."""


@given(
    EIGHTHS,
    EIGHTHS,
    EIGHTHS,
    EIGHTHS,
    st.dictionaries(st.sampled_from("abcd"), EIGHTHS),
    st.sets(st.sampled_from("abx")),
    st.integers(1, 100),
    st.none() | st.integers(0, 100),
)
def test_the_budget_follows_the_formula(
    capacity: int,
    allocatable: int,
    reservation: int,
    system: int,
    pods: dict[str, int],
    be_pods: set[str],
    threshold: int,
    least: int | None,
) -> None:
    used = {uid: milli / 1000 for uid, milli in pods.items()}
    node = (system + sum(pods.values())) / 1000
    usage = Usage(capacity, allocatable, node, reservation, used, frozenset(be_pods))
    others = sum(milli for uid, milli in pods.items() if uid not in be_pods)
    left = capacity * threshold // 100 - others - max(system, capacity - allocatable, reservation)
    assert budget(usage, threshold, least) == max(
        left, capacity * least // 100 if least is not None else left
    )


def test_pod_usage_above_the_usage_of_the_node_does_not_raise_the_budget() -> None:
    """Two counters are never read at the same moment."""
    assert budget(Usage(20_000, 20_000, 5.0, pods={"x": 6.0})) == 13_000 - 6_000


def test_the_pool_grows_slowly_and_shrinks_at_once() -> None:
    assert cpu_count_for(2001, 8, 8) == 3
    assert cpu_count_for(-1, 8, 8) == 2
    assert cpu_count_for(9000, 2, 8) == 3, "a tenth of 8, rounded up"
    assert cpu_count_for(9000, 2, 70) == 9
    assert cpu_count_for(90_000, 2, 101) == 13


@given(st.integers(-3000, 300_000), st.integers(0, 256), st.integers(1, 256))
def test_at_least_two_cpus_and_a_tenth_more_at_a_time(milli: int, now: int, machine: int) -> None:
    whole = max(2, math.ceil(Fraction(milli, 1000)))
    assert cpu_count_for(milli, now, machine) == min(whole, now + math.ceil(Fraction(machine, 10)))


def test_cpus_of_lsr_pods_give_their_share() -> None:
    held = [AnnotatedCpus(QosClass.LSR, CpuSet([0, 4, 1, 5]))]
    assert choose_cpus(LOCATIONS, held, Withheld(), 4000, CpuSet(range(8))) == CpuSet([0, 4, 2, 6])


@pytest.mark.parametrize("qos", [QosClass.LS, QosClass.SYSTEM, QosClass.NONE])
def test_cpus_of_other_pods_than_those_of_lsr_are_as_good_as_any(qos: QosClass) -> None:
    lsr, other = AnnotatedCpus(QosClass.LSR, CpuSet([0, 4])), AnnotatedCpus(qos, CpuSet([1, 5]))
    now = CpuSet(range(8))
    chosen = choose_cpus(LOCATIONS, [lsr, other], Withheld(), 4000, now)
    assert chosen == choose_cpus(LOCATIONS, [lsr], Withheld(), 4000, now)


def test_lse_wins_when_annotations_overlap() -> None:
    held = [AnnotatedCpus(QosClass.LSE, CpuSet([0])), AnnotatedCpus(QosClass.LSR, CpuSet([0, 1]))]
    assert 0 not in choose_cpus(LOCATIONS, held, Withheld(), 7000, CpuSet(range(8)))


def test_too_few_cpus_change_nothing() -> None:
    assert choose_cpus(LOCATIONS, [], Withheld(reserved=CpuSet(range(7))), 3000, CpuSet(range(8))) == CpuSet()
    assert choose_cpus(LOCATIONS, [], Withheld(reserved=CpuSet(range(8))), 3000, CpuSet(range(8))) == CpuSet()
    assert choose_cpus([], [], Withheld(), 3000, CpuSet()) == CpuSet()


@given(HELD, WITHHELD, st.integers(-5000, 20_000), SETS)
def test_foreign_cpus_are_never_chosen(
    held: list[AnnotatedCpus], withheld: Withheld, milli: int, now: CpuSet
) -> None:
    chosen = choose_cpus(LOCATIONS, held, withheld, milli, now)
    every = be_cpus(CpuSet(range(8)), held, withheld)
    assert chosen <= every
    assert every.isdisjoint(withheld.kubelet | withheld.reserved | withheld.system)
    for each in held:
        assert each.qos is not QosClass.LSE or every.isdisjoint(each.cpus)
    assert len(chosen) <= max(2, len(now) + 1)


@pytest.mark.parametrize(
    ("milli", "now", "quota"),
    [
        (3000, 900_000, 300_000),
        (9000, 300_000, 400_000),
        (9000, -1, 900_000),
        (5099, 500_000, None),
        (5100, 500_000, 510_000),
        (0, 2000, 2000),
        (50, -1, 5000),
    ],
)
def test_a_quota_rises_by_a_tenth_at_most_and_stays_at_small_changes(
    milli: int, now: int, quota: int | None
) -> None:
    assert quota_for(milli, 10, now) == quota


@given(st.integers(-3000, 300_000), st.integers(1, 256), st.just(-1) | st.integers(2000, 25_600_000))
@example(7559, 256, 500_000)  # a thousandth of a CPU below a hundredth of the machine
@example(7560, 256, 500_000)
def test_a_quota_is_the_budget_in_steps_of_a_tenth_of_the_machine(milli: int, machine: int, now: int) -> None:
    """A budget of a thousandth of a CPU is 100 microseconds of each period."""
    wanted, whole = max(2000, milli * 100), machine * 100_000
    quota = quota_for(milli, machine, now)
    if now != -1 and abs(wanted - now) < Fraction(whole, 100) and wanted > 2000:
        assert quota is None
    elif now != -1 and wanted > now + whole // 10:
        assert quota == now + whole // 10
    else:
        assert quota == wanted


def test_only_one_way_of_suppression_is_active_and_the_other_is_undone() -> None:
    first = suppression_round(SuppressMode.QUOTA, ModeStatuses())
    assert (first.give_back_cpus, first.give_back_quota) == (True, False)
    assert first.after == ModeStatuses(ModeStatus.RECOVERED, ModeStatus.USING)
    then = suppression_round(SuppressMode.CPUSET, first.after)
    assert (then.give_back_cpus, then.give_back_quota) == (False, True)
    assert then.after == ModeStatuses(ModeStatus.USING, ModeStatus.RECOVERED)
    assert not suppression_round(SuppressMode.CPUSET, then.after).give_back_quota, "it is undone once"
    off = suppression_round(SuppressMode.OFF, then.after)
    assert (off.give_back_cpus, off.give_back_quota) == (True, False)
    assert suppression_round(SuppressMode.OFF, off.after).give_back_cpus, (
        "the pools may have changed in the meantime"
    )
    assert suppression_round(SuppressMode.OFF, ModeStatuses()).give_back_quota, (
        "an earlier run may have left a quota"
    )
