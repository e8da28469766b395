"""Sets of ids: the list format, the operations, and what is refused."""

from __future__ import annotations

import itertools

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
def test_reads_and_writes_the_kernels_lists(text: str, members: set[int], canonical: str) -> None:
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
def test_refuses_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        CpuSet.parse(text)
    assert (
        "list of ids" in str(caught.value)
        or "outside" in str(caught.value)
        or "backwards" in str(caught.value)
    )


@pytest.mark.parametrize("bad", [-1, 65536])
def test_refuses_ids_that_no_kernel_has(bad: int) -> None:
    with pytest.raises(ValueError, match="outside 0-65535"):
        CpuSet([0, bad])
    with pytest.raises(ValueError, match="negative"):
        CpuSet.from_bits(-1)


@given(ids)
def test_text_and_set_are_the_same(members: set[int]) -> None:
    cpus = CpuSet(members)
    assert list(cpus) == sorted(members)
    assert len(cpus) == len(members)
    assert bool(cpus) is bool(members)
    assert CpuSet.parse(str(cpus)) == cpus
    assert CpuSet.from_bits(cpus.bits) == cpus


@given(ids)
def test_text_is_the_shortest(members: set[int]) -> None:
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
def test_membership(members: set[int], item: int) -> None:
    assert (item in CpuSet(members)) is (item in members)


def test_first() -> None:
    assert CpuSet.parse("7-9,64").first() == 7
    with pytest.raises(ValueError, match="empty"):
        CpuSet().first()


def test_operations_keep_the_type_and_types_do_not_mix() -> None:
    assert type(CpuSet([1]) | CpuSet([2])) is CpuSet
    assert type(Mask.parse("0") & Mask([0])) is Mask
    assert CpuSet([1]) != Mask([1])
    assert IdSet() != 0
    assert "1" not in CpuSet([1])


def test_shows_itself() -> None:
    assert repr(CpuSet([0, 1, 5])) == "CpuSet('0-1,5')"
    assert repr(Mask()) == "Mask('')"
