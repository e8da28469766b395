"""How the process runs the daemon."""

from __future__ import annotations

import asyncio

import pytest

from proxy import process
from proxy.config.load import parse
from proxy.executor.background import JobCounter
from proxy.frontends.cri.relay_loop import RelayLoop
from proxy.model.errors import TopoproxyError


@pytest.mark.parametrize("setting", ["0", "300us"])
def test_the_event_loop_polls_as_configured(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    loops = []

    def daemon(*_: object, **__: object) -> None:
        loops.append(asyncio.get_running_loop())
        raise TopoproxyError("stop here")

    monkeypatch.setattr(process, "Daemon", daemon)
    monkeypatch.setattr(process, "guard_imports", lambda: None)
    monkeypatch.setattr(process.logs, "setup", lambda *_: None)
    jobs = JobCounter()
    monkeypatch.setattr(process, "JOBS", jobs)
    config = parse(f"busyPoll: {setting}", "test")
    with pytest.raises(TopoproxyError, match="stop here"):
        process.run(config)
    (loop,) = loops
    assert isinstance(loop, RelayLoop)
    assert loop.may_poll()
    jobs.add(1)
    assert not loop.may_poll()
    assert loop.busy_poll_s == config.busy_poll == {"0": 0, "300us": 0.0003}[setting]
