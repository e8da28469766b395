from __future__ import annotations

import pytest

from proxy.model.koordinator import KeepQuota
from proxy.pools.quota import pod_quota, quota_again, quota_of_owner


@pytest.mark.parametrize(
    ("owns", "containers", "keep", "quota"),
    [
        (True, 1, KeepQuota.NEVER, -1),
        (True, 3, KeepQuota.NEVER, -1),
        (True, 1, KeepQuota.SEVERAL_CONTAINERS, -1),
        (True, 2, KeepQuota.SEVERAL_CONTAINERS, None),
        (True, 1, KeepQuota.ALWAYS, None),
        (False, 1, KeepQuota.NEVER, None),
        (False, 2, KeepQuota.SEVERAL_CONTAINERS, None),
    ],
)
def test_whose_quota_is_switched_off(owns: bool, containers: int, keep: KeepQuota, quota: int | None) -> None:
    assert quota_of_owner(owns=owns, containers=containers, keep=keep) == quota


def test_it_is_put_back_when_they_own_nothing_any_more() -> None:
    assert quota_again(None, -1, 200_000) == -1
    assert quota_again(-1, None, 200_000) == 200_000
    assert quota_again(-1, None, 0) == -1, "there was none"
    assert quota_again(-1, -1, 200_000) is None
    assert quota_again(None, None, 200_000) is None


def test_the_quota_of_a_pod() -> None:
    assert pod_quota([1500, 500]) == 200_000
    assert pod_quota([1500], period=10_000) == 15_000
    assert pod_quota([1500, 0]) == -1, "one of them has no limit"
    assert pod_quota([]) == -1
    assert pod_quota([1]) == 1000, "the kernel takes no less"
