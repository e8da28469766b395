"""The rate limit on requests: ten at once, then one each hundredth of a second."""

from __future__ import annotations

from proxy.frontends.podresources.server import RequestLimit


def test_ten_requests_at_once_and_a_hundred_a_second_are_admitted() -> None:
    now = [100.0]
    limit = RequestLimit(lambda: now[0])
    assert [limit.allows() for _ in range(11)] == [True] * 10 + [False]
    now[0] += 0.005
    assert not limit.allows()
    now[0] += 0.006
    assert [limit.allows(), limit.allows()] == [True, False]
    now[0] += 3600
    assert [limit.allows() for _ in range(11)] == [True] * 10 + [False]
