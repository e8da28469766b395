"""What the admin socket reports about hooks."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.admin_routes import Pages
from proxy.config.load import parse
from proxy.daemon_parts import DaemonParts
from proxy.hooks_setup import DaemonHooks


class ReportedHooking(DaemonHooks):
    """A stand-in for the hooks of a daemon, which has only the page."""

    def __init__(self, page: dict[str, object]) -> None:
        self._page = page

    def page(self) -> dict[str, object]:
        return self._page


def pages(config: str = "", hooks: DaemonHooks | None = None) -> Pages:
    return Pages(parse(config, "test"), DaemonParts(hooks=hooks))


@pytest.mark.parametrize(
    ("config", "note"),
    [
        ("mode: observe", "hooks need mode enforce"),
        ("hooks: {enabled: false}", "hooks are off (hooks.enabled)"),
    ],
)
def test_the_reason_is_reported_if_no_hooks_are_called(config: str, note: str) -> None:
    assert pages(config).hooks() == {"schema": "topoproxy-hooks-list/1", "hooks": [], "note": note}
    assert "hooks" not in pages(config).status()


def test_the_status_has_the_content_of_the_route_or_nothing() -> None:
    reported: dict[str, Any] = {
        "hooks": [{"name": "10-a", "state": "running", "calls": 1, "breaker_open": False}]
    }
    having = pages(hooks=ReportedHooking(reported))
    assert having.status()["hooks"] == reported
    assert having.hooks() == {"schema": "topoproxy-hooks-list/1", **reported}
    assert 'topoproxy_hook_calls_total{hook="10-a"} 1\n' in having.metrics()
    empty = pages(hooks=ReportedHooking({}))
    assert "hooks" not in empty.status()
    assert empty.hooks()["hooks"] == [], "a caller can distinguish that from another program's answer"
    assert "topoproxy_hook" not in empty.metrics()
