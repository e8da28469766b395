from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.model.idset import CpuSet
from proxy.topology.files import SysfsTree, parse_mask
from proxy.topology.sysfs_writer import mask_text


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("0", ""),
        ("f", "0-3"),
        ("00000000,0000000f\n", "0-3"),
        ("1,00000000", "32"),
        ("3,00000001", "0,32-33"),
        ("0x3,0x00000001", "0,32-33"),
        ("1,0,2", "1,64"),
        ("0xffffffffff", "0-39"),
        ("FF", "0-7"),
    ],
)
def test_a_mask_of_the_kernel_is_read_as_a_set_of_ids(text: str, ids: str) -> None:
    assert str(CpuSet.from_bits(parse_mask(text))) == ids


@pytest.mark.parametrize("text", ["", ",", "g", "0-3", "1,", "1 0", "-1", "0x", "1_0", "123456789,00000000"])
def test_an_invalid_mask_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a bit mask"):
        parse_mask(text)


def test_mask_beyond_any_machine_is_refused() -> None:
    assert parse_mask("8" + "0" * 16383).bit_length() == CpuSet.LIMIT
    with pytest.raises(ValueError, match="larger than any machine"):
        parse_mask("1" + "0" * 16384)


@given(st.sets(st.integers(0, 300)), st.integers(1, 300))
def test_mask_reads_back_what_was_written(ids: set[int], width: int) -> None:
    assert CpuSet.from_bits(parse_mask(mask_text(CpuSet(ids), width))) == CpuSet(ids)


def test_the_mask_wins_over_the_list_and_garbage_falls_back_to_it(tmp_path) -> None:
    tree = SysfsTree(tmp_path)
    (tmp_path / "x_list").write_text("0-7\n")
    assert tree.id_set("x") == 0xFF
    (tmp_path / "x").write_text("3\n")
    assert tree.id_set("x") == 3
    assert tree.problems == []
    (tmp_path / "x").write_text("what?\n")
    assert tree.id_set("x") == 0xFF
    assert tree.problems == ["x: 'what?' is not a bit mask"]


def test_unreadable_files_give_none_and_never_block(tmp_path) -> None:
    tree = SysfsTree(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "empty").write_text("")
    (tmp_path / "nul").write_bytes(b"\0\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("missing", "directory", "loop", "directory/x", "bad\0name"):
        assert tree.text(name) is None
    assert tree.text("fifo") in (None, "")
    assert [tree.text("empty"), tree.text("nul")] == ["", ""]
    assert [tree.number("empty"), tree.mask("empty"), tree.id_list("empty")] == [None, None, 0]
    assert [tree.number("binary"), tree.mask("binary"), tree.id_list("binary")] == [None, None, None]
    assert len(tree.problems) == 3
    assert tree.exists("loop")
    assert tree.names("missing") == []


def test_a_file_that_holds_no_integer_has_no_number(tmp_path) -> None:
    tree = SysfsTree(tmp_path)
    for text, want in (("-1\n", -1), ("007", 7), ("1.5", None), ("9" * 30, None)):
        (tmp_path / "n").write_text(text)
        assert tree.number("n") == want


def test_numbered_entries_are_exact_and_in_order_of_number(tmp_path) -> None:
    for name in ("cpu10", "cpu9", "cpu", "cpufreq", "cpu01", "cpu-1", "xcpu3", "cpu70000"):
        (tmp_path / name).mkdir()
    assert SysfsTree(tmp_path).numbered(".", "cpu") == [9, 10]


def test_long_files_are_read_completely(tmp_path) -> None:
    text = ",".join(str(i) for i in range(0, 40000, 2))
    assert len(text) > 65536
    (tmp_path / "long").write_text(text)
    assert SysfsTree(tmp_path).id_list("long") == sum(1 << i for i in range(0, 40000, 2))
