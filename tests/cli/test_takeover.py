"""The pages of a takeover for people, also of answers that are not what they should be."""

from __future__ import annotations

import pytest

from proxy.cli.takeover import done_text, plan_text, status_text


@pytest.mark.parametrize(
    "answer", [None, [], "odd", {}, {"left": 1, "next": {}, "kubelet": [], "allocations": ["x"]}]
)
def test_what_is_missing_is_left_out(answer: object) -> None:
    assert plan_text(answer).startswith("takeover:  ?\nkubelet:   does not run\n")
    assert status_text(answer).startswith("takeover:  ?\n")
    assert done_text(answer) == "\n"


def test_names_of_pods_cannot_draw_on_the_terminal() -> None:
    row = {"container": "ns/\x1b[31mred", "cpus": "1", "state": "runs", "from_file": True}
    page = plan_text({"stage": "none", "allocations": [row], "conflicts": ["a\nb"]})
    assert "1     -          runs   ns/ [31mred (static pod)" in page
    assert "Obstacles\n  - a b\n" in page


def test_a_finished_takeover_with_nothing_left() -> None:
    page = status_text(
        {"stage": "finished", "target": "none", "since": 1.0, "old": 2, "left": [], "next": []}
    )
    assert page.startswith("takeover:  finished (kubelet's policy: none), since ")
    assert "Old allocations: 0 of 2 are left\n" in page
    assert page.endswith("\nNothing remains to be done.\n")


def test_options_of_kubelet_and_a_file_that_cannot_be_used() -> None:
    kubelet = {
        "policy": "static",
        "options": {"full-pcpus-only": "true"},
        "file": "/f",
        "file_problem": "torn",
    }
    page = status_text({"stage": "started", "kubelet": {**kubelet, "running": ["a sign"]}})
    assert "kubelet:   runs (a sign)\n" in page
    assert "CPU manager: policy static, full-pcpus-only=true\n" in page
    assert "/f: torn\n" in page
