"""A takeover with a kubelet that writes its file, pods that start and end, and a daemon killed at any step.

These states must never occur: a container without its CPUs or with those of another one, a file that kubelet
would reject, a kubelet that does not start under the policy that the commands named, a takeover that cannot
be reverted.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from proxy.allocation.cpu_topology import CpuTopology
from proxy.backends.kubelet.checkpoint_writer import write_cpu_state
from proxy.backends.kubelet.checkpoints import read_cpu_checkpoint
from proxy.engine.container_create import place
from proxy.engine.invariants import violations
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet
from proxy.model.kubelet import CpuManager
from proxy.model.workload import Phase, Pod, Pool, Request
from proxy.takeover import writer as module
from proxy.takeover.inputs import CpuManagerFile, TakeoverInputs, live_pods, owning_containers
from proxy.takeover.record import TakeoverStage
from proxy.takeover.rules import StepRefusedError, finish, revert, start
from proxy.takeover.writer import TakeoverWriter, read_state_file
from proxy.topology.regular_machine import regular_machine

MACHINE = regular_machine(2, 1, 4, 2)
KEEPS_BACK = CpuSet([0, 1])

DEATHS = st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5, 6])
"""Before or after which write the daemon is killed (record, file, record); 0: it is not killed."""


class DiedError(BaseException):
    """The daemon is killed."""


class Takeovers(RuleBasedStateMachine):
    """The node: kubelet's directory, and the ledger and the state of the daemon."""

    make_kubelet: Any
    make_ledger: Any

    @initialize()
    def begin(self) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="tp-machine-")
        root = Path(self.directory.name)
        self.kubelet = self.make_kubelet(root / "kubelet", MACHINE.online, KEEPS_BACK)
        self.kubelet.start("static")
        self.ledger = self.make_ledger()
        self.backups = root / "backups"
        self.state = NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE)))
        self.serial = 0
        self.now = 1.0
        self.writes_between = False
        self.boot()

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            self.directory.cleanup()

    # -- the daemon ---------------------------------------------------------------------------------------

    def boot(self) -> None:
        self.writer = TakeoverWriter(
            self.ledger, self.kubelet.directory, self.backups, self.pause, lambda: self.now
        )
        self.writer.recover()
        assert self.writer.record.pending is None
        self.follow()

    def pause(self, seconds: float) -> None:
        if self.writes_between and self.kubelet.runs:
            self.kubelet.write()

    def follow(self) -> None:
        """Apply the rules of the record and the CPUs that kubelet holds, as the service does."""
        record = self.writer.record
        reserved = record.reserved if record.chooses_cpus else CpuSet()
        node = Node(MACHINE, CpuTopology.of(MACHINE), static=record.chooses_cpus, reserved=reserved)
        file = CpuManagerFile.of(read_state_file(self.kubelet.directory)[0])
        held = file.held.held if file.held is not None and file.policy == "static" else {}
        self.state = self.state.with_node(node).with_kubelet_cpus(record.in_effect(held))

    def inputs(self) -> TakeoverInputs:
        return TakeoverInputs(
            self.kubelet.directory,
            CpuManagerFile.of(read_state_file(self.kubelet.directory)[0]),
            CpuManager("static", reserved=KEEPS_BACK),
            ("process 1 is kubelet",) if self.kubelet.runs else (),
            owning=owning_containers(self.state),
            pods=live_pods(self.state),
            online=MACHINE.online,
            shareable=self.state.node.shareable,
        )

    def act(self, decide: Any, dies_at: int) -> bool:
        """Take a step; the daemon may be killed before or after one of its writes, and then starts again."""
        remaining_allocations = [dies_at]

        def killable(write: Any) -> Any:
            def write_or_die(*args: Any) -> None:
                for act in (lambda: None, lambda: write(*args)):
                    act()
                    remaining_allocations[0] -= 1
                    if remaining_allocations[0] == 0:
                        raise DiedError

            return write_or_die

        self.now += 1
        try:
            with (
                patch.object(module, "write_cpu_state", killable(write_cpu_state)),
                patch.object(self.ledger, "write", killable(self.ledger.write)),
            ):
                self.writer.resolve_pending()
                self.writer.carry_out(decide(self.writer.record, self.inputs()))
        except StepRefusedError:
            return False
        except DiedError:
            self.boot()
            return False
        else:
            return True
        finally:
            self.follow()

    # -- events --------------------------------------------------------------------------------------------

    @precondition(lambda self: self.kubelet.runs)
    @rule(count=st.sampled_from([1, 2, 3]))
    def pod_comes(self, count: int) -> None:
        self.serial += 1
        uid = f"u{self.serial}"
        named = self.kubelet.admit(uid, count)
        if self.kubelet.policy == "static" and not named:
            return  # kubelet rejects the pod
        self.follow()
        if self.writer.record.chooses_cpus:
            assert f"{uid}/main" not in self.state.owners, "kubelet's allocations for new pods have no effect"
        pod = Pod(f"s-{uid}", uid, "ns", uid)
        self.state = self.state.with_pod(pod)
        request = Request(1024 * count, -1 if named else 100_000 * count, 100_000, 0, str(named))
        plan = place(self.state, pod, "main", 0, request, f"c-{uid}")
        if plan.container is None:
            self.state = self.state.without_pod(pod.sandbox_id)
            self.kubelet.forget(uid)
            return
        own = plan.container.placement.exclusive
        if self.writer.record.stage is TakeoverStage.NONE and named:
            assert own == named, "CPUs that kubelet assigns are adopted unchanged"
        if plan.container.placement.pool is Pool.OWN:
            assert len(own) == count
            assert own.isdisjoint(KEEPS_BACK)
        running = plan.container.in_phase(Phase.RUNNING)
        self.state = plan.state.changed(put=(running,))

    @precondition(lambda self: len(self.state.containers) > 0)
    @rule(data=st.data())
    def pod_ends(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.state.containers)))
        pod = self.state.containers[key].pod
        self.state = self.state.changed(drop=(key,)).without_pod(pod.sandbox_id)
        if self.kubelet.runs:
            self.kubelet.forget(pod.uid)
        self.follow()

    @precondition(lambda self: self.kubelet.runs)
    @rule()
    def kubelet_stops(self) -> None:
        self.kubelet.stop()

    @precondition(lambda self: not self.kubelet.runs)
    @rule()
    def kubelet_starts(self) -> None:
        """Start as the commands instruct: if the file is not the one that finish wrote, finish again."""
        record, file = self.writer.record, CpuManagerFile.of(read_state_file(self.kubelet.directory)[0])
        if record.stage is TakeoverStage.FINISHED and file.policy != record.target:
            assert self.act(lambda r, s: finish(r, s, r.target, with_running=True, force=False), 0)
        policy = record.target if record.stage is TakeoverStage.FINISHED else "static"
        self.kubelet.start(policy)  # raises if it would crash-loop
        given = CpuSet()
        for pod in self.kubelet.held.values():
            (cpus,) = pod.values()
            assert cpus.isdisjoint(given), "kubelet has assigned the same CPUs to two pods"
            given |= cpus
        there = {pod.uid for pod in self.state.pods.values()}
        for uid in [uid for uid in self.kubelet.held if uid not in there]:
            self.kubelet.forget(uid)  # kubelet removes stale state
        self.follow()

    @rule(dies_at=DEATHS)
    def takeover_starts(self, dies_at: int) -> None:
        self.act(lambda record, inputs: start(record, inputs, self.now), dies_at)

    @rule(
        policy=st.sampled_from(["none", "static"]),
        dies_at=DEATHS,
        with_running=st.booleans(),
        force=st.booleans(),
        between=st.booleans(),
    )
    def takeover_finishes(
        self, policy: str, dies_at: int, with_running: bool, force: bool, between: bool
    ) -> None:
        self.writes_between = between
        was, runs = self.writer.record, self.kubelet.runs
        done = self.act(lambda r, s: finish(r, s, policy, with_running=with_running, force=force), dies_at)
        self.writes_between = False
        if done:
            assert self.writer.record.stage is TakeoverStage.FINISHED
            assert CpuManagerFile.of(self.kubelet.path.read_text()).policy == policy
            if policy == "static" and was.target != policy:
                self.check_file()
            assert (force or was.stage is TakeoverStage.FINISHED) or not runs

    @rule(dies_at=DEATHS, force=st.booleans())
    def takeover_reverts(self, dies_at: int, force: bool) -> None:
        if self.kubelet.runs and force:
            return  # a running kubelet with policy none would write its file again
        was = self.writer.record
        done = self.act(lambda r, s: revert(r, s, force=force), dies_at)
        if done:
            assert self.writer.record.stage is TakeoverStage.NONE
            if was.chooses_cpus:
                self.check_file()
        elif not self.kubelet.runs:
            assert self.act(lambda r, s: revert(r, s, force=False), 0), "a takeover can always be reverted"

    def check_file(self) -> None:
        """Check that kubelet's file has every owner with its CPUs."""
        held = CpuManagerFile.of(self.kubelet.path.read_text()).held
        assert held is not None
        for each in owning_containers(self.state):
            assert held.held.get(each.uid, {}).get(each.name) == each.cpus, "no container is lost"

    @rule()
    def daemon_dies(self) -> None:
        self.boot()

    # -- invariants ---------------------------------------------------------------------------------------

    @invariant()
    def everything_is_in_order(self) -> None:
        if not hasattr(self, "state"):
            return
        assert self.writer.record.pending is None
        found = read_cpu_checkpoint(self.kubelet.path.read_text())
        assert found.version == 2, "the checksum is right at every moment"
        assert violations(self.state) == []
        owned = CpuSet()
        for container in self.state.containers.values():
            own = container.placement.exclusive
            assert own.isdisjoint(owned), "no CPU has two owners"
            owned |= own
            if own:
                assert self.state.owners[container.owner].cpus == own
        assert self.state.pools.shared.isdisjoint(owned)
        record = self.writer.record
        file = CpuManagerFile.of(self.kubelet.path.read_text())
        if (
            record.stage is TakeoverStage.FINISHED
            and file.text == record.written
            and record.target == "static"
        ):
            assert file.held is not None
            assert file.held.default >= KEEPS_BACK


def test_no_sequence_of_takeover_steps_breaks_an_invariant(make_kubelet: Any, make_ledger: Any) -> None:
    Takeovers.make_kubelet = staticmethod(make_kubelet)
    Takeovers.make_ledger = staticmethod(make_ledger)
    run_state_machine_as_test(
        Takeovers,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
