from __future__ import annotations

import io

import pytest

from proxy.demo.picture import SnapshotPicture
from proxy.demo.snapshot import ContainerCpuset, Snapshot
from proxy.demo.terminal import Screen
from proxy.model.idset import CpuSet, Mask
from proxy.topology.regular_machine import regular_machine

BOTH = Mask([0, 1])


def seen(name, label, cpus, mems=BOTH, *, owns=False):
    return ContainerCpuset(name, label, CpuSet.parse(cpus), mems, owns, owns, label == "BE")


BEFORE = Snapshot((seen("web", "LS", "0-15"), seen("batch", "BE", "0-1"), seen("old", "LSR", "6", owns=True)))
AFTER = Snapshot(
    (
        seen("web", "LS", "0-1,4-15"),
        seen("batch", "BE", "0-1,4"),
        seen("trading", "LSE", "2-3", Mask([0]), owns=True),
    )
)


def drawn(width: int, machine=None, *, colour=False, encoding="utf-8") -> str:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding)
    screen = Screen(out, colour=colour, width=width)
    SnapshotPicture(screen, machine or regular_machine(2, 1, 4, 2, sibling_offset=False)).draw(BEFORE, AFTER)
    out.flush()
    return raw.getvalue().decode(encoding)


def row(text: str, begins: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(begins))


def marks(text: str, begins: str) -> str:
    return "".join(row(text, begins)[22:64].split("  ")).replace(" ", "")


def test_at_80_columns():
    text = drawn(80)
    assert "socket 0, node 0" in text
    assert "socket 1, node 1" in text
    assert row(text, "owners   before").endswith("· ·  · ·  · ·  O ·   · ·  · ·  · ·  · ·  old")
    assert row(text, "after").endswith("· ·  T T  · ·  · ·   · ·  · ·  · ·  · ·  trading")
    assert row(text, "web").endswith("■ ■  ✗ ✗  ■ ■  ■ ■   ■ ■  ■ ■  ■ ■  ■ ■  0-15 → 0-1,4-15")
    assert row(text, "batch").endswith("■ ■       ▲                              0-1 → 0-1,4")
    assert row(text, "trading").endswith("■ ■                                 2-3 mem 0")
    assert row(text, "old").endswith("gone")


def test_memory_nodes_are_shown_if_there_is_room():
    assert row(drawn(120), "web").endswith("0-15 → 0-1,4-15 mem 0-1")


@pytest.mark.parametrize("width", [60, 80, 100, 120])
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 1, 4, 2), (2, 2, 8, 2), (1, 1, 2, 1), (8, 1, 16, 2)])
def test_nothing_is_wider_than_the_screen(width, shape):
    text = drawn(width, regular_machine(*shape))
    assert max(map(len, text.splitlines())) <= width
    for cpu in {0, shape[0] * shape[1] * shape[2] - 1}:
        assert f"{cpu}" in text.split()


def test_ascii_streams_get_ascii():
    text = drawn(80, encoding="ascii")
    assert row(text, "web").endswith("# #  x x  # #  # #   # #  # #  # #  # #  0-15 -> 0-1,4-15")


def test_colours_add_nothing_else():
    import re

    coloured = drawn(80, colour=True)
    assert "\x1b[" in coloured
    assert "\x1b[" not in drawn(80)
    plain = "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", coloured).splitlines())
    assert plain == drawn(80).rstrip("\n")


def test_no_color_and_pipes(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert Screen(Terminal()).colour
    assert not Screen(io.StringIO()).colour
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Screen(Terminal()).colour
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert not Screen(Terminal()).colour
