"""A create that is asked for again may be answered with what an earlier one made (CRI-O does so)."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.engine import runtime_knowledge


async def made_by_the_first(w: Any, status: int | None) -> str:
    """A create ends badly, CPUs get an owner, and the next create is given what the first one made."""
    sandbox = await w.pod("early", "LS")
    first = await w.begin(sandbox)
    w.wire.finished(first, status)
    await w.run(await w.pod("lse", "LSE", "", "0-3"))
    container: str = w.finish(await w.begin(sandbox), "made")
    w.runtime.specs[container] = "0-15"
    w.log.clear()
    await w.start(container)
    return container


@pytest.mark.parametrize("status", [None, 4], ids=["the client is gone", "an error"])
def test_it_starts_with_todays_set(live: Any, status: int | None) -> None:
    async def day(w: Any) -> None:
        container = await made_by_the_first(w, status)
        assert w.log[0:2] == [f"runtime {container} 4-15", "forward StartContainer"]
        assert w.on(container) == "4-15"

    live(day)


def test_an_owner_starts_on_its_cpus(live: Any) -> None:
    async def day(w: Any) -> None:
        sandbox = await w.pod("lse", "LSE", "", "0-3")
        w.wire.finished(await w.begin(sandbox), 4)
        container = w.finish(await w.begin(sandbox), "made")
        w.runtime.specs[container] = "8-11"
        await w.start(container)
        assert f"runtime {container} 0-3 quota -1" in w.log

    live(day)


def test_a_container_created_at_once_is_not_updated(live: Any) -> None:
    async def day(w: Any) -> None:
        sandbox = await w.pod("early", "LS")
        w.wire.finished(await w.begin(sandbox, "other"), 4)
        container = await w.create(sandbox)
        w.log.clear()
        await w.start(container)
        assert w.log[0] == "forward StartContainer"

    live(day)


def test_the_oldest_are_forgotten(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_knowledge, "REMEMBERED_FAILURES", 2)

    async def day(w: Any) -> None:
        sandbox = await w.pod("early", "LS")
        for name in ("a", "b", "c"):
            w.wire.finished(await w.begin(sandbox, name), 4)
        w.log.clear()
        for name, updated in (("a", False), ("b", True), ("c", True)):
            container = await w.run(sandbox, name)
            assert (f"runtime {container} 0-15" in w.log) is updated

    live(day)
