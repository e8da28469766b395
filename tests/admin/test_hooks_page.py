"""Hooks on the status page, and what the daemon tells of them."""

from __future__ import annotations

import time
from typing import Any

from proxy.admin.hooks import hooks, last_error
from proxy.admin.page import render
from proxy.hooks.engine.stats import HookReport
from proxy.hooks.files.entries import Entry, State
from proxy.hooks.page import hooks_page

POINTS = ("pre_create_container",)


def used(name: str, state: State = State.RUNNING, error: str = "") -> Entry:
    return Entry(name, f"/h/{name}.py", state, error, POINTS, "Ignore", 0.5)


def report(name: str, **more: Any) -> HookReport:
    return HookReport(name, f"/h/{name}.py", POINTS, "Ignore", 0.5, **more)


def shown(entries: list[Entry], reports: list[HookReport], width: int = 100, **more: object) -> list[str]:
    return list(hooks({"hooks": hooks_page(entries, reports), **more}, width))


def test_no_section_where_there_are_no_hooks() -> None:
    assert list(hooks({}, 80)) == []
    assert list(hooks({"hooks": []}, 80)) == []
    assert "Hooks" not in render({"hooks": {}})


def test_those_that_do_well_are_counted_and_the_others_named() -> None:
    entries = [
        used("10-well"),
        used("20-old", State.OLD, "cannot load hook /h/20-old.py: SyntaxError"),
        Entry("30-bad", "/h/30-bad.py", State.UNTRUSTED, "cannot trust hook /h/30-bad.py: chmod"),
        Entry("40-off", "/h/40-off.py", State.DISABLED),
        Entry("10-well", "/v/10-well.py", State.MASKED, "/h/10-well.py is taken instead"),
        used("50-open"),
        used("60-failing"),
    ]
    at = time.time() - 130
    reports = [
        report("10-well", calls=3, last_error="once", last_error_at=at),
        report("20-old"),
        report("50-open", state="open", last_error="ValueError: x", last_error_at=at),
        report("60-failing", state="failing", last_error="no answer within 500 ms", last_error_at=0.0),
    ]
    served = {"socket": "/run/topoproxy/hooks.sock"}
    lines = shown(entries, reports, serving=served)
    assert lines[:6] == [
        "",
        "Hooks (4): 10-well, 20-old, 50-open, 60-failing",
        "  20-old: old version running: cannot load hook /h/20-old.py: SyntaxError",
        "  30-bad: untrusted: cannot trust hook /h/30-bad.py: chmod",
        "  50-open: not asked for now: ValueError: x (2 min ago)",
        lines[5],
    ]
    assert lines[5].startswith("  60-failing: fails: no answer within 500 ms (")
    assert lines[6:] == ["  served to Koordinator's runtime proxy at /run/topoproxy/hooks.sock"]
    assert "\nHooks (4): 10-well, " in render({"hooks": {"hooks": hooks_page(entries, reports)}})


def test_long_lines_are_cut_and_strange_answers_left_out() -> None:
    long = used("10-x", State.BROKEN, "e" * 300)
    assert max(map(len, shown([long], [], width=60))) == 60
    assert list(hooks({"hooks": [{"name": "\x1b", "state": "odd"}, 3]}, 80))[2:] == ["   : odd"]


def test_the_page_says_why_no_hook_is_called() -> None:
    bad = Entry("30-bad", "/h/30-bad.py", State.BROKEN, "why")
    assert shown([bad], []) == ["", "Hooks (0)", "  30-bad: broken: why"]


def test_ages() -> None:
    def ago(seconds: float) -> str:
        return last_error({"last_error": "x", "last_error_at": 1000.0}, 1000.0 + seconds)

    assert [ago(s) for s in (3, 300, 7200, 200_000)] == [
        "x (3 s ago)", "x (5 min ago)", "x (2 h ago)", "x (2 d ago)"
    ]  # fmt: skip
    assert last_error({"last_error": ""}) == ""


def test_the_page_joins_files_and_reports() -> None:
    entries = [used("10-a"), Entry("koordlet", "/s/koordlet.json", State.BROKEN, "why", server=True)]
    first, second, third = hooks_page(
        entries, [report("10-a", state="hangs", calls=2, failures={"timeout": 2}), report("late")]
    )
    assert (first["state"], first["asked"], first["breaker_open"]) == ("running", "hangs", True)
    assert (first["calls"], first["failures"], first["kind"]) == (2, {"timeout": 2}, "file")
    assert (second["broken"], second["kind"], second["error"]) == (True, "server", "why")
    assert "calls" not in second
    assert third["name"] == "late", "a hook in use is never left out"
