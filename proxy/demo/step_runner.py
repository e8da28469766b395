"""Runs one step: takes a snapshot, acts, takes another one, compares and shows them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from proxy.demo.client import DemoPod, StartedPod
from proxy.demo.environment import DemoEnvironment
from proxy.demo.expected_sets import Expectation
from proxy.demo.picture import SnapshotPicture
from proxy.demo.snapshot import DemoError, Snapshot
from proxy.demo.terminal import Screen
from proxy.model.errors import TopoproxyError
from proxy.model.idset import CpuSet
from proxy.model.phrases import cpus as named

_TIMEOUT_S = 5.0
"""Seconds for changes after the answer: pools grow when CPUs become free."""


@dataclass(frozen=True, slots=True)
class DemoStep:
    """One step.

    Attributes:
        title: What happens.
        why: One or two sentences for the reader.
        act: Performs the step, and returns sentences about its own checks.
        at_once: Whether the files must be right as soon as the call returns, not a moment later.
        shows_node_at_create: Whether to show the node as it was when the create reached the runtime, if that
            can be observed; after the step the node must be as it was before.
    """

    title: str
    why: str
    act: Callable[[], list[str]]
    at_once: bool = False
    shows_node_at_create: bool = False


class StepRunner:
    """Runs steps in an environment.

    Attributes:
        expected: The expected content of the files.
        checks: How many checks were made and succeeded.
    """

    def __init__(self, environment: DemoEnvironment, screen: Screen, pause: float = 0.0) -> None:
        self.environment = environment
        self.screen = screen
        self.expected = Expectation(environment.machine)
        self.checks = 0
        self._picture = SnapshotPicture(screen, environment.machine)
        self._pause = pause
        self._number = 0

    def run_step(self, step: DemoStep) -> None:
        """Run one step.

        Raises:
            DemoError: The node is not in the claimed state afterwards.
        """
        self._number += 1
        before = self.environment.snapshot()
        self.screen.title(self._number, step.title)
        self.screen.paragraph(step.why)
        try:
            sentences = step.act()
            after = self.wait_until_expected(0.0 if step.at_once else _TIMEOUT_S)
            sentences.append(self._check_status_page(after))
        except (DemoError, TopoproxyError):
            self._picture.draw(before, self.environment.snapshot())
            raise
        if step.shows_node_at_create and before.containers != after.containers:
            raise DemoError("the cgroup files are not as they were before")
        if step.shows_node_at_create and self.environment.snapshot_at_create is not None:
            self._picture.draw(before, self.environment.snapshot_at_create, "meanwhile")
            sentences.append("Afterwards every cgroup file reads as before.")
        else:
            self._picture.draw(before, after)
        self.screen.line()
        for sentence in sentences:
            self.screen.success(sentence)
        self.checks += len(sentences)
        if self._pause:
            time.sleep(self._pause)

    def wait_until_expected(self, seconds: float = _TIMEOUT_S) -> Snapshot:
        """Read the files until they have the expected values, and return them.

        Raises:
            DemoError: They do not have these values within that time.
        """
        deadline = time.monotonic() + seconds
        while True:
            snapshot = self.environment.snapshot()
            try:
                self.expected.check(snapshot)
            except DemoError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.02)
            else:
                return snapshot

    def _check_status_page(self, snapshot: Snapshot) -> str:
        """Compare the proxy's own page with the files; both may change until the runtime is updated."""
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            page = self.environment.status()
            cpus_by_ref = {row["ref"]: row["cpus"] for row in page["containers"] if row["phase"] == "running"}
            files = {f"demo/{container.name}/main": str(container.cpus) for container in snapshot.containers}
            if cpus_by_ref == files:
                break
            if time.monotonic() >= deadline:
                raise DemoError(f"the proxy reports {cpus_by_ref}, the cgroup files contain {files}")
            time.sleep(0.02)
            snapshot = self.environment.snapshot()
        if page["violations"]:
            raise DemoError(f"the proxy finds its own plan broken: {page['violations']}")
        if not files:
            return "No container is left, and the proxy reports none."
        count = len(files)
        return (
            f"Read back from {count} cgroup{'s' if count > 1 else ''}: as the rules say, as the proxy's "
            "status says, and no container is on CPUs of another."
        )

    # Shared by several steps.

    def launch(self, spec: DemoPod, own: CpuSet | None = None) -> StartedPod:
        """Run a pod whose container gets exclusive CPUs, or runs on its pool."""
        pod = self.environment.client.run_pod(spec)
        self.environment.pods.append(pod)
        self.environment.client.create(pod)
        self.environment.client.start(pod.container_id)
        self.expected.record_started(pod, own)
        return pod

    def end(self, name: str) -> None:
        """Stop and remove a pod."""
        pod = self.pod(name)
        self.environment.client.stop(pod.container_id)
        self.environment.client.end_pod(pod)
        self.environment.pods.remove(pod)
        self.expected.record_ended(name)

    def pod(self, name: str) -> StartedPod:
        """Find a pod that was launched."""
        return next(pod for pod in self.environment.pods if pod.spec.name == name)

    def reason(self, name: str) -> str:
        """Query the proxy for the reason of a container's placement."""
        rows = self.environment.status()["containers"]
        return next((str(row["reason"]) for row in rows if row["ref"] == f"demo/{name}/main"), "")

    def check_others_left(self, spec: DemoPod, cpus: CpuSet) -> str:
        """Check that the others had left when the create reached the runtime, if that can be observed.

        Raises:
            DemoError: One of them had not left.
        """
        seen = self.environment.snapshot_at_create
        if seen is None:
            return ""
        for container in seen.containers:
            stays = container.uses_be_pool and spec.qos == "LSR"
            if not stays and not container.cpus.isdisjoint(cpus):
                raise DemoError(
                    f"{container.name} was still on CPUs {container.cpus} when the create of {spec.name} "
                    "arrived"
                )
        return f"When the create reached the runtime, no container was on {named(cpus)} any more."


def sentence_list(sentence: str) -> list[str]:
    """Return a list with the sentence; an empty list for an empty sentence."""
    return [sentence] if sentence else []
