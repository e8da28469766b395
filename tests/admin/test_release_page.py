"""A node that is left, for people."""

from __future__ import annotations

from proxy.admin.page import render
from proxy.admin.release import release


def test_how_far_it_is() -> None:
    data = {"stage": "releasing", "told": 3, "containers": 9, "left": ["cannot update: busy"]}
    assert release(data) == [
        "release: 3 of 9 containers updated, calls are only relayed",
        "  still: cannot update: busy",
    ]
    assert release({**data, "left": None}) == ["release: 3 of 9 containers updated, calls are only relayed"]


def test_that_it_is_over() -> None:
    page = render({"mode": "released", "release": {"stage": "released"}})
    assert page.startswith(
        "topoproxy, mode released\nrelease: calls are only relayed, containers are not moved"
    )
    assert release({}) == []
