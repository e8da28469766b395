"""Sets of ids: the list format, the operations, and what is refused."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.model.idset import CpuSet, IdSet, Mask

ids = st.sets(st.integers(0, 300))


@pytest.mark.parametrize(
    ("text", "members", "canonical"),
    [
        ("", set(), ""),
        ("  \n", set(), ""),
        ("0", {0}, "0"),
        ("0-3,8\n", {0, 1, 2, 3, 8}, "0-3,8"),
        ("8,0-1,2", {0, 1, 2, 8}, "0-2,8"),
        ("5-5,5", {5}, "5"),
        ("1,2", {1, 2}, "1-2"),
        ("0-2,1-4", {0, 1, 2, 3, 4}, "0-4"),
        ("65535", {65535}, "65535"),
    ],
)
def test_lists_of_the_kernel_are_read_and_written(text: str, members: set[int], canonical: str) -> None:
    cpus = CpuSet.parse(text)
    assert set(cpus) == members
    assert str(cpus) == canonical


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "-1",
        "1-",
        "1-2-3",
        "1,,2",
        ",",
        "1 2",
        "3-1",
        "65536",
        "0-65536",
        "9" * 30,
        "0x3",
        "+1",
        "\u0661",
        "1;2",
    ],
)
def test_invalid_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        CpuSet.parse(text)
    assert (
        "list of ids" in str(caught.value)
        or "outside" in str(caught.value)
        or "backwards" in str(caught.value)
    )


@pytest.mark.parametrize("bad", [-1, 65536])
def test_ids_beyond_the_kernels_limit_are_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="outside 0-65535"):
        CpuSet([0, bad])
    with pytest.raises(ValueError, match="negative"):
        CpuSet.from_bits(-1)


@given(ids)
def test_text_and_set_convert_without_loss(members: set[int]) -> None:
    cpus = CpuSet(members)
    assert list(cpus) == sorted(members)
    assert len(cpus) == len(members)
    assert bool(cpus) is bool(members)
    assert CpuSet.parse(str(cpus)) == cpus
    assert CpuSet.from_bits(cpus.bits) == cpus


@given(ids)
def test_the_text_is_the_shortest(members: set[int]) -> None:
    parts = [part.split("-") for part in str(CpuSet(members)).split(",") if part]
    starts_after = [int(b[0]) - int(a[-1]) for a, b in itertools.pairwise(parts)]
    assert all(gap > 1 for gap in starts_after), "neighbouring runs are joined"
    assert all(len(part) == 1 or int(part[0]) < int(part[1]) for part in parts)


@given(ids, ids)
def test_operations_are_those_of_sets(a: set[int], b: set[int]) -> None:
    left, right = CpuSet(a), CpuSet(b)
    assert set(left | right) == a | b
    assert set(left & right) == a & b
    assert set(left - right) == a - b
    assert (left <= right) is (a <= b)
    assert (left < right) is (a < b)
    assert (left >= right) is (a >= b)
    assert (left > right) is (a > b)
    assert left.isdisjoint(right) is a.isdisjoint(b)
    assert (left == right) is (a == b)
    assert left != right or hash(left) == hash(right)


@given(ids, st.integers(-5, 400))
def test_a_cpu_set_contains_exactly_its_members(members: set[int], item: int) -> None:
    assert (item in CpuSet(members)) is (item in members)


def test_the_first_member_is_the_smallest() -> None:
    assert CpuSet.parse("7-9,64").first() == 7
    with pytest.raises(ValueError, match="empty"):
        CpuSet().first()


def test_operations_keep_the_type_and_types_do_not_mix() -> None:
    assert type(CpuSet([1]) | CpuSet([2])) is CpuSet
    assert type(Mask.parse("0") & Mask([0])) is Mask
    assert CpuSet([1]) != Mask([1])
    assert IdSet() != 0
    assert "1" not in CpuSet([1])


def test_a_set_has_a_readable_repr() -> None:
    assert repr(CpuSet([0, 1, 5])) == "CpuSet('0-1,5')"
    assert repr(Mask()) == "Mask('')"


# -- wide and sparse sets -----------------------------------------------------------------------------------

WIDE = st.sets(st.integers(0, 65535), max_size=200) | st.sets(st.integers(1000, 1100), max_size=100)


@given(WIDE)
def test_wide_sets_have_exactly_their_ids(members: set[int]) -> None:
    cpus = CpuSet(members)
    assert cpus.bits == sum(1 << i for i in members)
    assert list(cpus) == sorted(members)
    assert CpuSet.parse(str(cpus)) == cpus
    assert CpuSet.parse(",".join(map(str, sorted(members, reverse=True)))) == cpus


@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 300)), max_size=150))
def test_wide_ranges_that_overlap_are_joined(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{low}-{low + more}" for low, more in runs)
    assert set(CpuSet.parse(text)) == {i for low, more in runs for i in range(low, low + more + 1)}


class Counted(int):
    """An integer that counts the bits that its operations touch."""

    touched = 0

    def _of(self, value: int) -> Counted:
        Counted.touched += self.bit_length()
        return Counted(value)

    def __and__(self, other: int) -> Counted:
        return self._of(int(self) & int(other))

    def __add__(self, other: int) -> Counted:
        return self._of(int(self) + int(other))

    def __rshift__(self, by: int) -> Counted:
        return self._of(int(self) >> int(by))

    def __neg__(self) -> Counted:
        return self._of(-int(self))

    def __invert__(self) -> Counted:
        return self._of(~int(self))


@pytest.mark.parametrize("walk", [str, list])
def test_arithmetic_on_a_sparse_set_grows_no_faster_than_the_set(walk: Callable[[CpuSet], object]) -> None:
    def touched(count: int) -> int:
        sparse = CpuSet.from_bits(Counted(int("01" * count, 2)))
        Counted.touched = 0
        walk(sparse)
        return Counted.touched

    assert touched(500) > 0, "every operation is counted"
    assert touched(32768) <= 65 * max(touched(500), 1024)


@pytest.mark.parametrize("work", ["parse", "build", "print", "walk", "overlap"])
def test_the_time_for_a_sparse_set_grows_no_faster_than_the_set(work: str) -> None:
    def job(count: int) -> Callable[[], object]:
        ids = range(0, 2 * count, 2)
        text, cpus = ",".join(map(str, ids)), CpuSet(ids)
        overlap = ",".join([f"0-{2 * count - 1}"] * count)
        jobs: dict[str, Callable[[], object]] = {
            "parse": lambda: CpuSet.parse(text),
            "build": lambda: CpuSet(ids),
            "print": lambda: str(cpus),
            "walk": lambda: list(cpus),
            "overlap": lambda: CpuSet.parse(overlap),
        }
        return jobs[work]

    def seconds(run: Callable[[], object]) -> float:
        began = time.thread_time()
        run()
        return time.thread_time() - began

    small, large = job(8192), job(32768)
    # Alternating, so that both are measured while the machine is fast and while it is slow.
    pairs = [(seconds(small), seconds(large)) for _ in range(12)]
    assert min(took for _, took in pairs) < 10 * min(took for took, _ in pairs), (
        "a quadratic algorithm takes 16 times as long"
    )


# -- bounds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("31", "CPU 31 is not on this machine (0-3,6-7)"),
        ("0-31", "CPU 31 is not on this machine (0-3,6-7)"),
        ("0-7", "CPU 4 is not on this machine (0-3,6-7)"),
        ("99999", "CPU 99999 is not on this machine (0-3,6-7)"),
    ],
)
def test_ids_are_bounded_while_they_are_read(text: str, message: str) -> None:
    there = CpuSet.parse("0-3,6-7")
    with pytest.raises(ValueError, match=r"^CPU") as caught:
        CpuSet.parse(text, there)
    assert str(caught.value) == message
    assert CpuSet.parse("1,6-7", there) == CpuSet([1, 6, 7])
    with pytest.raises(ValueError, match=r"^NUMA node 2 is not on this machine \(0-1\)$"):
        Mask.parse("0,2", Mask([0, 1]))


@given(ids, ids)
def test_a_list_is_read_if_and_only_if_the_machine_has_its_ids(members: set[int], there: set[int]) -> None:
    text = str(CpuSet(members))
    if members <= there:
        assert set(CpuSet.parse(text, CpuSet(there))) == members
    else:
        with pytest.raises(ValueError, match="is not on this machine"):
            CpuSet.parse(text, CpuSet(there))


@pytest.mark.parametrize(
    "text", ["x" * 10**6, "3-1," * 10**5, "\ud800", "\u202e\n", "0," * 10**6, "70000" + ",1" * 999]
)
def test_messages_quote_only_a_part_of_an_invalid_list(text: str) -> None:
    for there in (None, CpuSet(range(0, 8192, 2))):
        with pytest.raises(ValueError, match=r".") as caught:
            CpuSet.parse(text, there)
        assert len(str(caught.value)) <= 250
        assert str(caught.value).isprintable()
