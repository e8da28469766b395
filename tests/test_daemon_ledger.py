"""A daemon that cannot open its ledger keeps working without stored placements."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy import state_directory
from proxy.backends.ledger import open_ledger
from proxy.demo.client import DemoPod
from proxy.model.errors import CannotCreateError
from proxy.model.workload import KubeQos
from proxy.topology.regular_machine import regular_machine
from tests.testkit.daemon import DaemonNode, run, temporary_node

if TYPE_CHECKING:
    import pytest

MACHINE = regular_machine(1, 1, 4, 2)


def test_a_daemon_without_a_ledger_starts_and_places_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any, **__: Any) -> Any:
        raise CannotCreateError("cannot open the ledger: no space left on device")

    monkeypatch.setattr(state_directory, "open_ledger", no_room)
    with temporary_node(lambda directory: DaemonNode(directory, MACHINE)) as node:
        daemon = node.daemon()

        def work() -> str:
            with node.client() as client:
                pod = client.run_pod(DemoPod("lse", "LSE", KubeQos.GUARANTEED, "2-3", 2))
                container_id = client.create(pod)
                client.start(container_id)
                return container_id

        async def scenario() -> None:
            container_id = await asyncio.to_thread(work)
            assert daemon.executor is not None
            assert str(daemon.executor.state.containers[container_id].placement.exclusive) == "2-3"
            problems = [str(problem["what"]) for problem in daemon.executor.telemetry.problems()]
            assert any("placements are not kept" in what for what in problems)

        run(daemon, scenario)


def test_files_renamed_in_the_same_second_are_all_kept(tmp_path: Path) -> None:
    """No kept file is overwritten, even if the clock stands still or jumps back."""
    times = iter((2e9, 2e9, 1e9, -1.0))
    for number in range(4):
        (tmp_path / "ledger.jsonl").write_text(f"not ours {number}\n")
        book, notes = open_ledger(tmp_path, "here", now=lambda: next(times))
        book.close()
        assert "is not used" in notes[-1]
    kept = {file.read_text() for file in tmp_path.glob("ledger.jsonl.bad-*")}
    assert kept == {f"not ours {number}\n" for number in range(4)}
