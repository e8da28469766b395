"""Which taints of a node a pod tolerates."""

from __future__ import annotations

import pytest

from proxy.scheduler.taints import UNSCHEDULABLE, Taint, Toleration, taints_of, tolerates, tolerations_of

GPU = Taint("gpu", "NoSchedule", "a")


@pytest.mark.parametrize(
    ("toleration", "tolerated"),
    [
        (Toleration(), False),
        (Toleration(operator="Exists"), True),
        (Toleration("gpu", "Exists"), True),
        (Toleration("gpu", "Exists", effect="NoSchedule"), True),
        (Toleration("gpu", "Exists", effect="NoExecute"), False),
        (Toleration("other", "Exists"), False),
        (Toleration("gpu", "Equal", "a"), True),
        (Toleration("gpu", "", "a"), True),
        (Toleration("gpu", "Equal", "b"), False),
        (Toleration("gpu", "Gt", "5"), True),
    ],
)
def test_a_toleration_matches_by_key_value_and_effect(toleration: Toleration, tolerated: bool) -> None:
    assert tolerates((toleration,), (GPU,)) == tolerated


def test_each_taint_has_to_be_tolerated() -> None:
    assert tolerates((), ())
    assert not tolerates((Toleration("gpu", "Exists"),), (GPU, UNSCHEDULABLE))


def test_taints_that_keep_no_pod_away_are_not_read() -> None:
    taints = [
        {"key": "gpu", "value": "a", "effect": "NoSchedule"},
        {"key": "slow", "effect": "PreferNoSchedule"},
        {"key": "down", "effect": "NoExecute", "timeAdded": "2026-11-29T00:00:00Z"},
    ]
    assert taints_of({"spec": {"taints": taints, "unschedulable": True}}) == (
        GPU,
        Taint("down", "NoExecute"),
        UNSCHEDULABLE,
    )
    assert taints_of({}) == ()


def test_tolerations_are_read_from_the_pod() -> None:
    raw = {"spec": {"tolerations": [{"key": "gpu", "operator": "Exists", "tolerationSeconds": 5}]}}
    assert tolerations_of(raw) == (Toleration("gpu", "Exists"),)
    with pytest.raises(ValueError, match="str"):
        tolerations_of({"spec": {"tolerations": [{"key": 5}]}})
