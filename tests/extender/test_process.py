"""The process of the extender: its options."""

from __future__ import annotations

import pytest

from proxy.extender import process
from proxy.extender.process import ExtenderOptions
from proxy.model.errors import UsageError
from proxy.scheduler.scores import Strategy


def options(namespace: str, name: str) -> ExtenderOptions:
    strategy = Strategy.FEWEST_NUMA_NODES
    return ExtenderOptions("", 0, None, None, (namespace, name), strategy, "info", "text")


@pytest.mark.parametrize("lease", [("a", "b/c"), ("a", "B"), ("a", "b/"), ("a b", "c"), ("..", "c")])
def test_a_lease_that_no_object_can_be_is_refused(lease: tuple[str, str]) -> None:
    with pytest.raises(
        UsageError, match=f"^cannot start the extender: --lease must be NAMESPACE/NAME.*: {'/'.join(lease)}$"
    ):
        process.run(options(*lease))


@pytest.mark.parametrize("lease", [("topoproxy-system", "topoproxy-scheduler-extender"), ("a", "b.c-1")])
def test_names_of_objects_are_accepted(lease: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def ran(given: ExtenderOptions) -> int:
        assert given.lease == lease
        return 7

    monkeypatch.setattr(process, "_run", ran)
    monkeypatch.setattr(process.logs, "setup", lambda *_: None)
    assert process.run(options(*lease)) == 7
