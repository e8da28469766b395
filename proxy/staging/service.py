"""Applies the plan to running pods, or restores them, when mode or selection have changed.

This happens in steps that can be paused and reversed.

``proxy.engine.staging`` decides which pods a step changes. A step leads from any state in effect to the
configured state, so a step that a crash has interrupted is simply repeated.

* Applied: the step waits for calls at the runtime that carry other CPUs to the containers. Then the cpusets
  of containers that share CPUs are written and read back, and after them, one by one, those of owners: all
  other containers to which the plan is applied first leave the owner's CPUs, by the same barrier as at the
  owner's start (``executor.reservations``). Quotas, memory nodes, partitions, the runtime and systemd follow
  as after any change. A pod for which this fails is restored, reported, and tried again later.
* Restored: each container gets the cpuset that it would have without topoproxy, as in a release
  (``proxy.release``): first CFS quotas and partitions, then the kernel's sets, which only grow, then the
  runtime.

The record of a step is durable before anything is written for it. Steps begin ``enforce.stepPeriod`` apart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping

from proxy.engine.enforcement import applies_to, counts, live_pods
from proxy.engine.node_effects import EnforcementStep
from proxy.engine.node_events import EnforcementStepDone, EnforcementStepDue, EnforcementStepFailed
from proxy.engine.pod_fence import planned_cpus
from proxy.executor.background import Worker
from proxy.executor.node_executor import NodeExecutor
from proxy.model.backoff import Backoff, RetryTimes
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase
from proxy.release.kernel import target_of, widen_cpusets
from proxy.release.runtime_updates import Progress, RuntimeUpdater
from proxy.staging.problems import PodProblems
from proxy.telemetry import metrics

RETRY_BACKOFF = Backoff(5.0, 300.0)
"""Seconds before a pod to which the plan could not be applied is tried again."""
ROUNDS = 20
"""The most rounds in which a step tries to restore its pods; the next step continues."""
PAUSE_S = 0.1
RUNTIME_BUSY = "the runtime is still busy with it"


class StagedEnforcement:
    """Makes the steps."""

    def __init__(self, executor: NodeExecutor) -> None:
        """Prepare; no step is made yet.

        Args:
            executor: The node.
        """
        self._executor = executor
        self._worker = Worker("staging", executor.report_internal_error)
        executor.health.watch(self._worker)
        self._retries = RetryTimes[str](RETRY_BACKOFF)
        self._not_applied = PodProblems("cannot apply the plan to a running pod", executor.telemetry)
        self._not_given_back = PodProblems("cannot give a pod back", executor.telemetry)

    def problems(self) -> dict[str, str]:
        """Return the reasons of the present failures, by the pod's key."""
        self._forget()
        return self._not_applied.reasons | self._not_given_back.reasons

    async def run(self) -> None:
        """Make the steps that are due, until cancelled."""
        executor, loop = self._executor, asyncio.get_running_loop()
        while True:
            await executor.reconciled.wait()
            now = executor.state.enforcement
            self._forget()
            if executor.state.mode.in_release or not (now.moving or (now.lagging and not now.paused)):
                executor.enforcement_step_due.clear()
                await executor.enforcement_step_due.wait()
                continue
            began = loop.time()
            try:
                await self.step()
            except Exception as error:  # noqa: BLE001  whatever it is, the next step must come
                executor.report_internal_error(error)
            period = executor.options.step_period
            await asyncio.sleep(max(0.0, began + period - loop.time()))

    async def step(self) -> tuple[str, ...]:
        """Make one step; returns the keys of the pods that it has changed."""
        executor, now = self._executor, self._executor.clock()
        lagging = executor.state.enforcement.lagging
        skip = frozenset(key for key in lagging if not self._retries.due(key, now))
        effects = executor.store.handle(EnforcementStepDue(executor.options.pods_per_step, skip))
        keys = next((effect.keys for effect in effects if type(effect) is EnforcementStep), ())
        if not keys:
            return ()
        await executor.ledger_writer.flush()
        existing = self._containers(keys)
        to_apply = [c for c in existing if applies_to(executor.state, c.pod)]
        failed = await self._apply(to_apply)
        if failed:
            executor.store.handle(EnforcementStepFailed(frozenset(failed)))
        for key, why in failed.items():
            self._retries.failed(key, executor.clock())
            self._not_applied.report(key, _ref(existing, key), why)
        applied = {c.pod.key for c in to_apply} - failed.keys()
        back = [c for c in self._containers(keys) if c.pod.key not in applied]
        failed_to_restore = await self._give_back(back)
        executor.store.handle(EnforcementStepDone(frozenset(keys) - failed_to_restore.keys()))
        for key, why in failed_to_restore.items():
            self._not_given_back.report(key, _ref(back, key), why)
        self._forget()
        restored = {c.pod.key for c in back} - failed_to_restore.keys() - failed.keys()
        self._remember(applied, restored)
        self._report(applied, restored)
        return keys

    def _remember(self, applied: Collection[str], restored: Collection[str]) -> None:
        """Record for ``explain`` whether the plan is in effect for the containers of pods from now on."""
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self._executor.wall_clock()))
        history = self._executor.history
        for container in self._containers(applied):
            history.mark_applied(container.id, f"the plan is applied since {at}", applied=True)
        for container in self._containers(restored):
            history.mark_applied(container.id, f"given back at {at}: the pod is only observed", applied=False)

    def _containers(self, keys: Collection[str]) -> list[Container]:
        """Return the containers of some pods that have not exited."""
        existing = self._executor.state.containers.values()
        return [c for c in existing if c.pod.key in keys and c.phase is not Phase.EXITED]

    def _forget(self) -> None:
        """Forget the failures of pods that have reached their target, or have gone."""
        state = self._executor.state
        now, live = state.enforcement, live_pods(state).keys()
        moving, waiting = now.moving & live, (now.moving | now.lagging) & live
        self._not_given_back.end_others(moving)
        self._not_applied.end_others(waiting)
        self._retries.keep(waiting)

    def _report(self, applied: Collection[str], restored: Collection[str]) -> None:
        telemetry, pods = self._executor.telemetry, counts(self._executor.state)
        telemetry.count(metrics.PODS_ENFORCED, len(applied))
        telemetry.count(metrics.PODS_GIVEN_BACK, len(restored))
        if not pods.to_apply and not pods.to_give_back and not pods.moving:
            telemetry.event(
                "the plan is applied as configured", pods=pods.applied, observedPods=pods.observed
            )

    # -- applying -----------------------------------------------------------------------------------------

    async def _apply(self, containers: list[Container]) -> dict[str, str]:
        """Apply the plan to containers; returns the keys of the pods for which that failed, and why."""
        executor, failed = self._executor, await self._await_calls(containers)
        state = executor.state
        applied = [c for c in containers if c.pod.key not in failed]
        failed |= await self._write([c for c in applied if state.uses_shared_cpus(c)])
        owners = [c for c in applied if not state.uses_shared_cpus(c)]
        for container in owners:
            if container.pod.key in failed:
                continue
            await executor.quotas.before_start(container)
            reason = (await executor.reservations.start(container)).reason
            if reason is not None:
                failed[container.pod.key] = reason.message
                continue
            failed |= await self._write([container])
        ids = [c.id for c in applied if c.pod.key not in failed]
        executor.sync_later(*ids)
        executor.unit_properties.changed(ids)
        if owners:
            await self._follow_owners()
        return failed

    async def _follow_owners(self) -> None:
        """Update the parts that only owners have; the next reconcile repairs what fails here."""
        executor = self._executor
        await executor.writes.clear_sandboxes()
        await executor.quotas.once()
        await executor.mems.once()
        if executor.partitions is not None:
            executor.partitions.check_soon()

    async def _await_calls(self, containers: Iterable[Container]) -> dict[str, str]:
        """Wait for calls that carry other CPUs to containers; calls from now on carry the right ones."""
        executor, late = self._executor, dict[str, str]()
        state = executor.state
        calls = {
            call: c.pod.key
            for c in containers
            for call in state.inflight.of(c.id)
            if not call.carries <= state.desired_cpus(c)
        }
        if calls:
            await executor.inflight_calls.wait(list(calls), executor.options.call_timeout)
        for call, key in calls.items():
            if not executor.inflight_calls.has_completed(call):
                late[key] = "the runtime is still busy with a call for it"
        return late

    async def _write(self, containers: list[Container]) -> dict[str, str]:
        """Write cpusets; returns the keys of the pods whose cpusets the kernel refused, and why."""
        executor, pods = self._executor, {c.id: c.pod.key for c in containers}
        if not pods:
            return {}
        done = await executor.writes.run(executor.drift.write, list(pods))
        executor.report_errors(done)
        return {pods[i]: str(error) for i, error in done.refused.items() if i in pods}

    # -- restoring ----------------------------------------------------------------------------------------

    async def _give_back(self, containers: list[Container]) -> dict[str, str]:
        """Restore the cpusets that containers would have without topoproxy.

        Returns:
            The keys of the pods that are not restored yet, and why.
        """
        executor = self._executor
        if not containers:
            return {}
        keys, planned = {c.pod.key for c in containers}, planned_cpus(executor.state)
        executor.cpuset_writer.forget({c.id for c in containers})
        for container in containers:
            executor.drift.watch.drop(container.id)
        await executor.kubelet_cpus.refresh(self._worker)
        await executor.quotas.once()
        if executor.partitions is not None:
            await executor.partitions.once()
        updater, remaining = RuntimeUpdater(executor, self._worker, Progress()), dict[str, str]()
        for _ in range(ROUNDS):
            remaining = await self._sweep(updater, keys, planned)
            if not remaining:
                break
            await asyncio.sleep(PAUSE_S)
        return remaining

    async def _sweep(
        self, updater: RuntimeUpdater, keys: Collection[str], planned: Mapping[str, CpuSet]
    ) -> dict[str, str]:
        """Widen and send the remaining cpusets; returns the keys of the pods with failures, and why."""
        executor, progress = self._executor, updater.progress
        progress.remaining = {}
        state, manager = executor.state, executor.kubelet_cpus.manager
        existing = [c for c in self._containers(keys) if c.phase is not Phase.CREATING]
        targets = [(c, target_of(c, state.node.machine, manager)) for c in existing]
        pods = [pod for pod in state.pods.values() if pod.key in keys]
        result = await executor.kernel.run(
            widen_cpusets, executor.cpuset_writer, state, targets, pods, planned
        )
        progress.remaining |= result.errors
        progress.pending = [i for i in result.due if updater.is_due(i, result)]
        due = set(progress.pending)
        await updater.update_all(result, lambda: asyncio.sleep(0))
        unsent = due - progress.reported.keys() | {c.id for c in existing if updater.is_in_flight(c)}
        return _remaining(existing, progress.remaining, unsent)

    # -- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


def _ref(containers: Iterable[Container], key: str) -> str:
    """Return the namespace and the name of a pod, by its containers."""
    return next((c.pod.ref for c in containers if c.pod.key == key), key)


def _remaining(
    containers: Iterable[Container], errors: Mapping[str, str], unsent: Collection[str]
) -> dict[str, str]:
    """Return the keys of the pods that are not restored yet, and why.

    Args:
        containers: The containers of all pods of the step.
        errors: The failures by container. Other keys are those of groups and of the runtime, which concern
            all pods.
        unsent: Ids of the containers that are not updated at the runtime yet.
    """
    ids = {c.id for c in containers}
    shared = [why for key, why in errors.items() if key not in ids]
    reasons: dict[str, list[str]] = {}
    for container in containers:
        own_errors = [errors[container.id]] if container.id in errors else []
        if own_errors or shared or container.id in unsent:
            reasons.setdefault(container.pod.key, []).extend([*own_errors, *shared] or [RUNTIME_BUSY])
    return {key: "; ".join(dict.fromkeys(why)) for key, why in reasons.items()}
