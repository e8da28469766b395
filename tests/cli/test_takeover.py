"""The text pages of a takeover, also for incomplete answers of the daemon."""

from __future__ import annotations

import pytest

from proxy.cli.takeover import done_text, plan_text, status_text


@pytest.mark.parametrize(
    "answer", [None, [], "odd", {}, {"left": 1, "next": {}, "kubelet": [], "allocations": ["x"]}]
)
def test_missing_fields_of_an_answer_are_not_printed(answer: object) -> None:
    assert plan_text(answer).startswith("takeover:  ?\nkubelet:   does not run\n")
    assert status_text(answer).startswith("takeover:  ?\n")
    assert done_text(answer) == "\n"


def test_control_characters_in_pod_names_are_removed() -> None:
    row = {"container": "ns/\x1b[31mred", "cpus": "1", "state": "runs", "from_file": True}
    page = plan_text({"stage": "none", "allocations": [row], "conflicts": ["a\nb"]})
    assert "1     -          runs   ns/ [31mred (static pod)" in page
    assert "Obstacles\n  - a b\n" in page


def test_a_finished_takeover_is_printed() -> None:
    page = status_text(
        {"stage": "finished", "target": "none", "since": 1.0, "old": 2, "left": [], "next": []}
    )
    assert page.startswith("takeover:  finished (kubelet's policy: none), since ")
    assert "Old allocations: 0 of 2 are left\n" in page
    assert page.endswith("\nNothing remains to be done.\n")


def test_kubelets_options_and_unusable_files_are_printed() -> None:
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
