"""Several hook servers called by the engine, and their files in the server directory."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.api.koordinator import hook_pb2 as pb
from proxy.config.enums import FailurePolicy
from proxy.config.frozen_mapping import FrozenMapping
from proxy.config.hooks import HooksConfig, HookSettings
from proxy.hooks.answers import Adjustment
from proxy.hooks.engine.engine import HookEngine
from proxy.hooks.events import Point
from proxy.hooks.hook import Hook, HookFailurePolicy, Outcome
from proxy.hooks.loader.directories import HookFileState
from proxy.hooks.registry import HookRegistry
from proxy.hooks.samples import sample
from proxy.model.admission import Namespaces
from proxy.model.idset import CpuSet
from tests.testkit.captured_log import of_hooks
from tests.testkit.changed_copy import changed_copy

HookServer = Any  # of conftest
MakeHook = Callable[..., Hook]
EVENT = sample("pre_create_container")


def changing(**fields: Any) -> Callable[[Any], Any]:
    """Answer with an echo that changes some resources."""

    def answer(request: Any) -> Any:
        response = pb.ContainerResourceHookResponse(container_resources=request.container_resources)
        for name, value in fields.items():
            setattr(response.container_resources, name, value)
        return response

    return answer


def call_engine(*hooks: Hook, events: int = 1, event: Point = EVENT) -> tuple[list[Outcome], list[str]]:
    """Call the hooks of an engine; return the outcomes and the reported errors."""
    errors: list[str] = []

    async def main() -> list[Outcome]:
        engine = HookEngine(of_hooks(errors), lambda _updates, _owners: None)
        engine.use(hooks)
        try:
            return [await engine.call_hooks(event).wait() for _ in range(events)]
        finally:
            engine.close()

    return asyncio.run(main()), errors


def test_all_servers_are_called_in_order_and_get_earlier_changes(
    servers: Callable[[str], HookServer], hook_of: MakeHook
) -> None:
    """Koordinator's proxy calls only the first server that it finds, in no fixed order."""
    first, second, third = servers("first"), servers("second"), servers("third")
    first.answer = changing(cpu_shares=77)
    third.answer = changing(cpuset_cpus="2-3")
    hooks = [
        hook_of(third.path, name="koordlet"),
        hook_of(first.path, name="05-first"),
        hook_of(second.path, name="10-second"),
    ]
    outcomes, errors = call_engine(*hooks, events=5)
    for outcome in outcomes:
        assert outcome.adjustment == Adjustment(cpu_shares=77, cpus=CpuSet((2, 3)))
        assert outcome.owners == {"cpu_shares": "05-first", "cpus": "koordlet"}
    assert not errors
    assert {request.container_resources.cpu_shares for _, request in first.received} == {4096}
    assert {request.container_resources.cpu_shares for _, request in second.received + third.received} == {77}
    assert [len(server.received) for server in (first, second, third)] == [5, 5, 5]


def test_a_python_hook_runs_in_order_with_servers(server: HookServer, hook_of: MakeHook) -> None:
    def narrow(_event: Point) -> Adjustment:
        return Adjustment(cpus=CpuSet((4,)), envs={"PINNED": "4"})

    server.answer = changing(cpuset_cpus="2-5")  # no conflict: koordlet's set contains the hook's choice
    python = Hook("10-narrow", "10-narrow.py", {"pre_create_container": narrow})
    (outcome,), errors = call_engine(hook_of(server.path), python)
    assert outcome.adjustment == narrow(EVENT)
    assert not errors
    reported = server.received[0][1]
    assert (reported.container_resources.cpuset_cpus, reported.container_envs["PINNED"]) == ("4", "4")


def test_a_conflict_of_two_servers_names_both(
    servers: Callable[[str], HookServer], hook_of: MakeHook
) -> None:
    one, other = servers("one"), servers("other")
    one.answer, other.answer = changing(cpu_shares=77), changing(cpu_shares=78, cpu_period=5000)
    (outcome,), errors = call_engine(hook_of(one.path, name="a"), hook_of(other.path, name="b"))
    assert outcome.adjustment == Adjustment(cpu_shares=77)
    assert len(errors) == 1
    assert "cpu_shares" in errors[0]
    assert "hook a " in errors[0]
    assert "b" in errors[0]


@pytest.mark.parametrize("policy", list(HookFailurePolicy))
def test_a_hanging_server_is_skipped_or_fails_the_call_by_policy(
    servers: Callable[[str], HookServer], hook_of: MakeHook, policy: HookFailurePolicy
) -> None:
    """Koordinator's proxy waits as long as kubelet does."""
    slow, good = servers("slow"), servers("good")
    slow.answer, good.answer = slow.hang, changing(cpu_shares=77)
    hanging = changed_copy(hook_of(slow.path, name="a", timeout=0.2), policy=policy)
    started = time.monotonic()
    (outcome,), errors = call_engine(hanging, hook_of(good.path, name="b"))
    assert time.monotonic() - started < 10
    assert "no answer within 0.2 s" in errors[0]
    if policy is HookFailurePolicy.FAIL:
        assert "hook a" in outcome.refusal
        assert "no answer within 0.2 s" in outcome.refusal
        assert not good.received
    else:
        assert outcome.adjustment == Adjustment(cpu_shares=77)
        assert not outcome.refusal


def test_an_oversized_answer_is_dropped(servers: Callable[[str], HookServer], hook_of: MakeHook) -> None:
    flood, good = servers("flood"), servers("good")
    many = {f"key-{number}": "x" * 20 for number in range(50_000)}
    flood.answer = lambda _request: pb.ContainerResourceHookResponse(container_annotations=many)
    good.answer = changing(cpu_shares=77)
    hooks = hook_of(flood.path, name="a", timeout=30), hook_of(good.path, name="b")
    (outcome,), errors = call_engine(*hooks)
    assert outcome.adjustment == Adjustment(cpu_shares=77)
    assert len(errors) == 1
    assert "annotations" in errors[0]
    assert len(errors[0]) < 1000


def test_pods_with_the_label_are_hidden_from_servers(server: HookServer, hook_of: MakeHook) -> None:
    """Pods with the label are those of the servers themselves, which cannot answer yet."""
    event: Any = EVENT
    label = {"runtimeproxy.koordinator.sh/skip-hookserver": "true"}
    labelled = changed_copy(event, pod=changed_copy(event.pod, labels=label, namespace="kube-system"))
    (outcome,), _ = call_engine(hook_of(server.path), event=labelled)
    assert not outcome.adjustment
    assert not server.received


@pytest.mark.parametrize(
    ("namespace", "listed", "count"),
    [
        ("tenant-a", None, 1),
        ("kube-system", None, 0),
        ("koordinator-system", None, 0),
        ("kube-system-2", None, 1),
        ("tenant-a", ("*",), 0),
        ("tenant-a", ("tenant-?",), 0),
        ("kube-system", (), 1),
    ],
)
def test_the_label_hides_pods_from_servers_in_listed_namespaces_only(
    server: HookServer, hook_of: MakeHook, namespace: str, listed: tuple[str, ...] | None, count: int
) -> None:
    event: Any = EVENT
    label = {"runtimeproxy.koordinator.sh/skip-hookserver": "true"}
    pod = changed_copy(event.pod, labels=label, namespace=namespace)
    more = {} if listed is None else {"skip_namespaces": Namespaces(listed)}
    call_engine(hook_of(server.path, **more), event=changed_copy(event, pod=pod))
    assert len(server.received) == count


class ServerDirectory:
    """The server directory, as Koordinator's koordlet writes into it, and its reader."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.errors: list[str] = []
        settings = FrozenMapping({"b": HookSettings(timeout=3.0, policy=FailurePolicy.FAIL)})
        config = HooksConfig(
            directory=path / "no",
            vendor_directory=path / "no",
            server_directory=path,
            timeout=5,
            settings=settings,
        )
        self.engine = HookEngine(of_hooks(self.errors), lambda _updates, _owners: None)
        self.registry = HookRegistry(config, self.engine, lambda: None, of_hooks(self.errors))

    def write(self, name: str, content: str) -> None:
        file = self.path / name
        file.write_text(content)
        file.chmod(0o644)

    async def wait_for_states(self, **states: HookFileState) -> None:
        """Scan until the entries have exactly these states."""
        async with asyncio.timeout(20):
            while {entry.name: entry.state for entry in self.registry.entries} != states:
                await self.registry.scan_once()
                await asyncio.sleep(0.02)

    async def wait_for_report(self, text: str) -> None:
        """Scan until an error with this text is reported."""
        async with asyncio.timeout(20):
            while not any(text in complaint for complaint in self.errors):
                await self.registry.scan_once()
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self.registry.close()
        self.engine.close()

    async def call_hooks_once(self) -> Outcome:
        return await self.engine.call_hooks(EVENT).wait()


def server_file(server: HookServer, **more: Any) -> str:
    hooks = ["PreCreateContainer"]
    return json.dumps({"remote-endpoint": str(server.path), "runtime-hooks": hooks, **more})


def test_server_files_may_be_added_changed_broken_and_removed(
    servers: Callable[[str], HookServer], tmp_path: Path
) -> None:
    """A file that is empty for a moment makes Koordinator's proxy crash at its next call."""
    one, other = servers("one"), servers("other")
    one.answer, other.answer = changing(cpu_shares=77), changing(cpu_period=5000)
    (tmp_path / "d").mkdir(mode=0o755)

    async def main() -> None:
        watched = ServerDirectory(tmp_path / "d")
        watched.write("a.json", server_file(one))
        watched.write("b.json", server_file(other))
        await watched.wait_for_states(a=HookFileState.RUNNING, b=HookFileState.RUNNING)
        assert (await watched.call_hooks_once()).adjustment == Adjustment(cpu_shares=77, cpu_period=5000)
        by_name = {entry.name: entry for entry in watched.registry.entries}
        assert (by_name["b"].policy, by_name["b"].timeout, by_name["b"].server) == ("Fail", 3.0, True)
        assert (by_name["a"].policy, by_name["a"].timeout) == ("Ignore", 5.0)
        watched.write("a.json", "{")
        await watched.wait_for_states(a=HookFileState.OLD, b=HookFileState.RUNNING)
        await watched.wait_for_report("it is not JSON")
        assert (await watched.call_hooks_once()).adjustment == Adjustment(cpu_shares=77, cpu_period=5000)
        (tmp_path / "d" / "b.json").unlink()
        watched.write("a.json", server_file(one, **{"failure-policy": "Perhaps"}))
        await watched.wait_for_states(a=HookFileState.RUNNING)
        await watched.wait_for_report("Ignore is used hook=a ")
        assert (await watched.call_hooks_once()).adjustment == Adjustment(cpu_shares=77)
        await watched.close()

    asyncio.run(main())


def test_dropped_fields_are_reported_once(servers: Callable[[str], HookServer], tmp_path: Path) -> None:
    one = servers("one")
    one.answer = changing(cpuset_cpus="2,99")
    (tmp_path / "d").mkdir(mode=0o755)

    async def main() -> list[str]:
        watched = ServerDirectory(tmp_path / "d")
        watched.write("a.json", server_file(one))
        await watched.wait_for_states(a=HookFileState.RUNNING)
        for _ in range(3):
            assert (await watched.call_hooks_once()).adjustment == Adjustment(cpus=CpuSet((2,)))
        await watched.wait_for_report("field=cpuset_cpus")
        await watched.close()
        return watched.errors

    reports = [line for line in asyncio.run(main()) if 'field=cpuset_cpus reason="99' in line]
    assert len(reports) == 1
