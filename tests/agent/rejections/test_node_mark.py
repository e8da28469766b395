"""The mark of a node without room: set with the free amounts, and removed when these change."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.agent.rejections.node_mark import (
    KEY,
    NodeMark,
    as_annotation,
    from_annotation,
    is_over,
    marked,
    node_patch,
)
from proxy.config.cluster import KeepAway

MARK = NodeMark(1000.0, 4, {0: 2, 1: 3})
OTHERS = [{"key": "a", "effect": "NoSchedule"}, {"key": "b", "value": "c", "effect": "NoExecute"}]


def node(mark: NodeMark | None = None, *taints: dict[str, str]) -> dict[str, Any]:
    annotations = {"x": "y", **({KEY: as_annotation(mark)} if mark else {})}
    return {
        "metadata": {"name": "n", "resourceVersion": "7", "annotations": annotations},
        "spec": {"taints": [*OTHERS, *taints]},
    }


@pytest.mark.parametrize(
    ("free", "now", "over"),
    [
        ({0: 2, 1: 3}, 1001.0, False),  # nothing has changed
        ({0: 1, 1: 3}, 1001.0, False),  # less
        ({0: 3, 1: 3}, 1001.0, True),  # more on a NUMA node, and enough together
        ({0: 3, 1: 0}, 1001.0, False),  # more, but not enough for any of the pods
        ({0: 0, 1: 4}, 1001.0, True),
        ({0: 2, 1: 3, 2: 1}, 1001.0, True),  # a NUMA node was added
        ({0: 2, 1: 3}, 1600.0, True),  # the maximum time is over
        ({0: 2, 1: 3}, 900.0, True),  # the clock was set back
    ],
)
def test_a_mark_is_removed_when_room_appears_or_time_is_over(
    free: dict[int, int], now: float, over: bool
) -> None:
    assert is_over(MARK, free, 600.0, now) is over


def test_a_mark_counts_the_smallest_pod_and_the_newest_time() -> None:
    first = marked(None, [8, 6], {0: 1}, 10.0)
    assert first == NodeMark(10.0, 6, {0: 1})
    assert marked(first, [7], {0: 2}, 20.0) == NodeMark(20.0, 6, {0: 2})
    assert marked(first, [2], {0: 2}, 20.0).cpus == 2


INFINITE = '{"since": 1, "cpus": Infinity, "free": {}}'


def test_a_mark_survives_in_its_annotation() -> None:
    assert from_annotation(as_annotation(MARK)) == MARK


@pytest.mark.parametrize("text", ["", "x", "[]", "{}", '{"since": "x", "free": {}}', INFINITE, "[" * 5000])
def test_an_annotation_of_another_program_is_no_mark(text: str) -> None:
    assert from_annotation(text) is None


@pytest.mark.parametrize(
    ("keep_away", "effect"),
    [
        (KeepAway.NONE, ""),
        (KeepAway.ANNOTATION, ""),
        (KeepAway.PREFER_NO_SCHEDULE, "PreferNoSchedule"),
        (KeepAway.NO_SCHEDULE, "NoSchedule"),
    ],
)
def test_the_patch_of_a_node(keep_away: KeepAway, effect: str) -> None:
    patch = node_patch(node(), MARK, keep_away)
    if keep_away is KeepAway.NONE:
        assert patch is None
        return
    assert patch is not None
    assert patch["metadata"]["resourceVersion"] == "7", "another writer in between is a conflict"
    assert json.loads(patch["metadata"]["annotations"][KEY])["cpus"] == 4
    ours = {"key": KEY, "value": "true", "effect": effect}
    assert patch.get("spec") == ({"taints": [*OTHERS, ours]} if effect else None)
    there = node(MARK, *([ours] if effect else []))
    assert node_patch(there, MARK, keep_away) is None, "all is as it should be"
    off = node_patch(there, None, keep_away)
    assert off is not None
    assert off["metadata"]["annotations"] == {KEY: None}
    assert off.get("spec") == ({"taints": OTHERS} if effect else None)


def test_another_effect_replaces_the_taint() -> None:
    ours = {"key": KEY, "value": "true", "effect": "NoSchedule"}
    patch = node_patch(node(MARK, ours), MARK, KeepAway.PREFER_NO_SCHEDULE)
    assert patch is not None
    assert patch["spec"]["taints"] == [*OTHERS, {**ours, "effect": "PreferNoSchedule"}]


def test_the_last_taint_leaves_none() -> None:
    there = {"metadata": {}, "spec": {"taints": [{"key": KEY, "effect": "NoSchedule"}]}}
    patch = node_patch(there, None, KeepAway.NO_SCHEDULE)
    assert patch is not None
    assert patch["spec"] == {"taints": None}
    assert node_patch({}, None, KeepAway.NO_SCHEDULE) is None
