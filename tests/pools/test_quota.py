from __future__ import annotations

import pytest

from proxy.model.koordinator import KeepQuota
from proxy.pools.quota import quota_of_owner


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
def test_pods_whose_quota_is_switched_off(
    owns: bool, containers: int, keep: KeepQuota, quota: int | None
) -> None:
    assert quota_of_owner(owns=owns, containers=containers, keep=keep) == quota
