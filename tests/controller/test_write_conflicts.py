from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from proxy.controller.drift.write_conflicts import FIRST_S, LONGEST_S, MANY, QUIET_S, URGENT_S, WINDOW_S, Wars
from proxy.model.idset import CpuSet

WRONG = CpuSet.parse("0-3")


def fought(
    period: float, seconds: float, *, urgent: bool = False
) -> tuple[list[float], list[tuple[str, float]]]:
    """Play a writer who writes with a period; gives when it was put back, and when wars began and ended."""
    wars, repairs, turns = Wars(), list[float](), list[tuple[str, float]]()
    step = 0.25
    wrong, now, next_write = False, 0.0, 0.0
    while now <= seconds:
        if next_write <= now:
            wrong, next_write = True, next_write + period
        if wrong and not wars.waits("c", now, urgent=urgent):
            wrong = False
            repairs.append(now)
            if wars.repaired("c", WRONG, now):
                turns.append(("began", now))
        elif wrong:
            wars.left("c", WRONG, now)
        turns += [("over", now) for _ in wars.ended(now)]
        now += step
    return repairs, turns


def test_two_writes_are_not_a_conflict_and_the_third_is() -> None:
    wars = Wars()
    assert wars.repaired("c", WRONG, 0) is None
    assert wars.repaired("c", WRONG, 1) is None
    assert "c" not in wars
    assert not wars.waits("c", 1, urgent=False)
    war = wars.repaired("c", WRONG, 2)
    assert war is not None
    assert (war.began, war.times, war.found) == (0, MANY, WRONG)
    assert "c" in wars
    assert len(wars) == 1
    assert "d" not in wars


def test_writes_that_are_far_apart_never_make_a_war() -> None:
    repairs, turns = fought(WINDOW_S / 2 + 1, 600)
    assert turns == []
    assert len(repairs) == 600 // (WINDOW_S / 2 + 1) + 1, "each of them is put back at once"


def test_a_busy_writer_is_fought_ever_more_slowly_and_never_given_up() -> None:
    repairs, turns = fought(0.25, 1000)
    assert turns == [("began", 0.5)], "and it goes on"
    gaps = [b - a for a, b in itertools.pairwise(repairs)][2:]
    assert gaps[:4] == [FIRST_S, FIRST_S * 2, FIRST_S * 4, FIRST_S * 8]
    assert set(gaps[8:]) == {LONGEST_S}


def test_a_container_on_owned_cpus_is_repaired_soon_for_ever() -> None:
    repairs, _ = fought(0.25, 200, urgent=True)
    gaps = [b - a for a, b in itertools.pairwise(repairs)]
    assert max(gaps) == URGENT_S


def test_a_war_ends_when_it_has_been_quiet() -> None:
    wars = Wars()
    for now in (0, 1, 2):
        wars.repaired("c", WRONG, now)
    wars.left("c", CpuSet([7]), 3)
    assert wars.all()["c"].found == CpuSet([7])
    assert wars.ended(3 + QUIET_S - 0.01) == {}
    assert list(wars.ended(3 + QUIET_S)) == ["c"]
    assert "c" not in wars
    wars.repaired("c", WRONG, 40)
    assert "c" not in wars, "whoever comes then finds peace"


def test_a_container_that_is_gone_is_forgotten() -> None:
    wars = Wars()
    for container in ("a", "b"):
        for now in (0, 1, 2):
            wars.repaired(container, WRONG, now)
        wars.repaired(f"{container}-peace", WRONG, 2)
    wars.keep({"a", "a-peace"}, 3)
    assert list(wars.all()) == ["a"]
    for container in ("a-peace", "b-peace"):
        wars.repaired(container, WRONG, 3)
        wars.repaired(container, WRONG, 4)
    assert sorted(wars.all()) == ["a", "a-peace"]


@given(st.floats(0.25, 40), st.booleans())
def test_nothing_flaps_and_waits_stay_within_the_limit(period: float, urgent: bool) -> None:
    repairs, turns = fought(period, 400, urgent=urgent)
    assert len(turns) <= 1, "a writer that is steady has no war or one that does not end"
    assert not turns or turns[0][0] == "began"
    bound = URGENT_S if urgent else LONGEST_S
    gaps = [b - a for a, b in itertools.pairwise(repairs)]
    assert max(gaps, default=0) <= bound + period + 0.25


@given(st.lists(st.tuples(st.floats(0, 50), st.booleans()), max_size=60))
def test_a_war_needs_so_many_within_the_window(steps: list[tuple[float, bool]]) -> None:
    wars, now, times = Wars(), 0.0, list[float]()
    for pause, ask in steps:
        now += pause
        if ask:
            wars.keep({"c"}, now)
        if "c" in wars:
            assert wars.waits("c", now, urgent=True) is (now < wars.all()["c"].due(urgent=True))
            wars.repaired("c", WRONG, now)
            continue
        times.append(now)
        began = wars.repaired("c", WRONG, now)
        assert (began is not None) is (len(times) >= MANY and now - times[-MANY] <= WINDOW_S)
