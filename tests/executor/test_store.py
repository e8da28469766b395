"""The state of the node changes in one place, and all observers follow."""

from __future__ import annotations

import ast
import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import proxy
from proxy.allocation.cpu_topology import CpuTopology
from proxy.api.cri import api_pb2 as pb
from proxy.backends.kubelet.checkpoint_writer import static_state, write_cpu_state
from proxy.backends.kubelet.cpu_manager import KubeletCpuManagerReader
from proxy.backends.kubelet.settings import KubeletSettings
from proxy.engine.node import Node
from proxy.engine.node_effects import Change
from proxy.engine.node_events import ReservationCpusChanged, TakeoverChanged
from proxy.engine.owners import ReservationCpus
from proxy.engine.state import NodeState
from proxy.executor.background import Worker
from proxy.executor.ledger_writer import LedgerWriter
from proxy.executor.observer import Observer as ObserverBase
from proxy.executor.store import NodeStore
from proxy.model.idset import CpuSet
from proxy.topology.regular_machine import regular_machine

ALL = CpuSet.parse("0-15")
MACHINE = regular_machine(2, 1, 4, 2)


def kubelet_holds(world: Any, directory: Path, held: dict[str, dict[str, CpuSet]]) -> None:
    """Write the state file of kubelet's CPU manager, and have the node follow it."""
    write_cpu_state(directory, static_state(ALL, held, reserved=CpuSet([15])))
    port = KubeletCpuManagerReader(
        KubeletSettings(), str(directory), "", lambda: world.executor.state.node.topology
    )
    world.use_kubelet_cpus(port)


async def create_unannounced(world: Any, uid: str, qos: str) -> Any:
    """CreateContainer of a pod with a sandbox that was made when no proxy ran."""
    request = pb.CreateContainerRequest(pod_sandbox_id=f"s-{uid}")
    request.config.metadata.name = "c"
    request.sandbox_config.metadata.uid = request.sandbox_config.metadata.name = uid
    request.sandbox_config.metadata.namespace = "ns"
    request.sandbox_config.labels["koordinator.sh/qosClass"] = qos
    request.sandbox_config.linux.cgroup_parent = f"/kubepods/burstable/pod{uid}"
    return await world.call("CreateContainer", request)


def test_a_create_that_recounts_the_pools_notifies_kernel_and_hooks(
    run_scenario: Callable[..., None], tmp_path: Path
) -> None:
    """kubelet's state file holds CPUs for a pod; its label, known with the create, makes it share CPUs."""

    async def scenario(world: Any) -> None:
        kubelet_holds(world, tmp_path, {"g": {"c": CpuSet([2, 3])}})
        await world.sync.once()
        ls = await world.run(await world.pod("ls", "LS", "burstable"))
        assert world.on(ls) == "0-1,4-15"
        notified: list[str] = []
        world.executor.store.subscribe(
            StateListener(lambda: notified.append(str(world.executor.state.pools.shared)))
        )
        call = await create_unannounced(world, "g", "LS")
        assert call.refused is None
        assert str(world.executor.state.pools.shared) == "0-15"
        assert notified[:1] == ["0-15"]
        await world.quiet()
        assert world.on(ls) == "0-15"
        world.executor.kubelet_cpus.close()

    run_scenario(scenario, static=False)


class StateListener(ObserverBase):
    """Calls ``notify`` when pools or owners have changed."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self.notify = notify

    def changed(self, change: Change) -> None:
        self.notify()


# -- the store by itself ----------------------------------------------------------------------------------


class Observer(ObserverBase):
    """Records its notifications, with its name."""

    def __init__(
        self, name: str, log: list[str], then: Callable[[Change], None] = lambda change: None
    ) -> None:
        self.name = name
        self.log = log
        self.then = then

    def changed(self, change: Change) -> None:
        *_, newest = change.after.reservation_cpus
        self.log.append(f"{self.name} {newest}")
        self.then(change)


def in_store(work: Callable[[NodeStore, list[BaseException]], None]) -> None:
    """Use the store of an empty node; collect the errors that observers raise."""

    async def scenario() -> None:
        faults: list[BaseException] = []
        node = Node(MACHINE, CpuTopology.of(MACHINE), True)
        ledger_writer = LedgerWriter(None, Worker("ledger", faults.append), print, Counter())
        work(NodeStore(NodeState.empty(node), ledger_writer, faults.append), faults)

    asyncio.run(scenario())


def held(cpus: str, reservation: str) -> ReservationCpusChanged:
    """Return an event that changes the pools."""
    return ReservationCpusChanged(reservation, ReservationCpus("o", CpuSet.parse(cpus), excludes_be=True))


def test_observers_are_notified_in_order_and_one_change_at_a_time() -> None:
    def work(store: NodeStore, faults: list[BaseException]) -> None:
        log: list[str] = []

        def again(change: Change) -> None:
            if "second" not in change.after.reservation_cpus:
                store.handle(held("0-3", "second"))

        store.subscribe(Observer("a", log, again))
        store.subscribe(Observer("b", log))
        store.handle(held("4-7", "first"))
        assert log == ["a first", "b first", "a second", "b second"]

    in_store(work)


def test_a_fault_in_one_observer_does_not_affect_other_observers() -> None:
    def work(store: NodeStore, faults: list[BaseException]) -> None:
        log: list[str] = []
        store.subscribe(Observer("a", log, lambda change: 1 // 0))  # type: ignore[arg-type, return-value]
        store.subscribe(Observer("b", log))
        (change,) = store.handle(held("4-7", "first"))
        assert isinstance(change, Change)
        assert (log, [type(error) for error in faults]) == (["a first", "b first"], [ZeroDivisionError])
        assert store.state is change.after, "the state has changed nevertheless"

    in_store(work)


def test_a_change_without_effect_on_pools_and_rules_is_not_notified() -> None:
    def work(store: NodeStore, faults: list[BaseException]) -> None:
        log: list[str] = []
        store.subscribe(Observer("a", log))
        assert store.handle(TakeoverChanged(static=True, reserved=CpuSet())) == ()
        assert log == []

    in_store(work)


# -- nothing else assigns the state -----------------------------------------------------------------------


def test_the_store_replaces_the_state_when_it_handles_an_event() -> None:
    root = Path(proxy.__file__).parent
    own = ast.parse((root / "executor/store.py").read_text())
    writers = [
        function.name
        for function in ast.walk(own)
        if isinstance(function, ast.FunctionDef)
        for tree in ast.walk(function)
        if isinstance(tree, ast.Attribute) and tree.attr == "_state" and isinstance(tree.ctx, ast.Store)
    ]
    assert writers == ["__init__", "handle"]


def test_the_store_alone_has_the_engine_handle_events() -> None:
    root = Path(proxy.__file__).parent
    importing = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for tree in ast.walk(ast.parse(path.read_text()))
        if isinstance(tree, ast.ImportFrom) and tree.module == "proxy.engine.handle"
    }
    assert importing == {"executor/store.py", "engine/pod_dry_run.py"}, "a simulation has no store"


def test_the_state_cannot_be_assigned() -> None:
    def work(store: NodeStore, faults: list[BaseException]) -> None:
        with pytest.raises(AttributeError):
            store.state = store.state  # type: ignore[misc]

    in_store(work)


# -- the executor is above its parts ----------------------------------------------------------------------


def test_no_part_of_the_executor_knows_the_executor() -> None:
    """Parts take the context and the parts that they use; only pages of the whole node take the executor."""
    directory = Path(proxy.__file__).parent / "executor"
    importing = {
        str(path.relative_to(directory))
        for path in directory.rglob("*.py")
        for tree in ast.walk(ast.parse(path.read_text()))
        if isinstance(tree, ast.ImportFrom) and tree.module == "proxy.executor.node_executor"
    }
    assert importing == {"plan_report.py", "status_data.py"}


def test_the_kernel_follows_a_change_before_hooks_are_notified(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        names = [type(observer).__name__ for observer in world.executor.store._observers]
        expected = [
            "KernelWrites",
            "HookOverrides",
            "Rejections",
            "ProblemExpiry",
            "OwnerQuotas",
            "RuntimeEvents",
            "RuntimeSync",
        ]
        assert names == expected

    run_scenario(scenario)
