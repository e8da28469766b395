"""The policy of the node while it runs: by the Node object, kubelet and our configuration.

All are compared in each pass, the Node object in a worker. What has changed takes effect at once, without
moving owners (``proxy.engine.node_policy_applied``). What cannot be applied is reported; the old value stays
in effect, and it is tried again each time, since owners come and go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from msgspec import structs

from proxy.engine.node import Node
from proxy.engine.node_events import NodeRulesChanged
from proxy.engine.node_policy import NodePolicy, PolicyValue, read_node_policy
from proxy.engine.node_policy_applied import AppliedPolicy, apply_node_policy
from proxy.executor.context import NodeContext
from proxy.executor.kubelet_cpu_manager import KubeletCpus
from proxy.executor.worker import Worker
from proxy.model.errors import ConfigError
from proxy.model.kubelet import NodeMeta
from proxy.model.options import TopologyOptions
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from proxy.executor.ports import NamespaceLabels, NodeObject

NO_LABELS = "cannot read the labels of namespaces, which admission.namespaceSelector needs"
CANNOT_FOLLOW = "cannot follow a setting of the Node object"


class NodePolicySync:
    """Has the rules of the node follow its policy.

    Attributes:
        configured: The node as our configuration has it, on the machine of the start.
    """

    def __init__(
        self,
        context: NodeContext,
        kubelet_cpus: KubeletCpus,
        configured: Node,
        source: NodeObject | None = None,
        options: TopologyOptions | None = None,
        namespaces: NamespaceLabels | None = None,
    ) -> None:
        """Begin with our configuration alone.

        Args:
            context: Has the rules.
            kubelet_cpus: Knows what kubelet's CPU manager keeps.
            configured: The node as our configuration has it.
            source: Where the Node object is; None for none.
            options: Of the topology manager, as our configuration has them.
            namespaces: Where labels of namespaces are; None for none.
        """
        self._context = context
        self._kubelet_cpus = kubelet_cpus
        self.configured = configured
        self._source = source
        self._options = options or TopologyOptions()
        self._namespaces = namespaces
        self._labels: Mapping[str, Mapping[str, str]] | None = None
        self._reading = asyncio.Lock()
        self._open_problem = ""
        self._open = set[str]()
        context.learn(policy=read_node_policy(configured, configured.machine, None, None))

    @property
    def policy(self) -> NodePolicy:
        """What is in effect."""
        policy = self._context.state.facts.policy
        assert policy is not None
        return policy

    @property
    def meta(self) -> NodeMeta | None:
        """The newest Node object read; None where there is none, or it could never be read."""
        return self._context.state.facts.node_meta

    async def follow(self, worker: Worker) -> None:
        """Read the Node object and the labels of namespaces in a worker, and have them take effect."""
        try:
            async with self._reading:
                if self._source is not None:
                    meta = await worker.run(self._source.read)
                    if meta != self.meta:
                        self._context.learn(recorded=False, node_meta=meta)
                if self._namespaces is not None:
                    self._labels = await worker.run(self._namespaces.read)
            self.apply()
        except Exception as error:  # noqa: BLE001 - a fault of ours must not stop the comparison
            self._context.broken(error)

    def apply(self) -> None:
        """Apply the policy that follows from the known facts to the state."""
        self._follow(self._applied(self.configured, self._options))

    def reconfigured(self, configured: Node, options: TopologyOptions) -> Callable[[], None]:
        """Prepare for another configuration of ours.

        Args:
            configured: The node as the new configuration has it, on the machine of ``configured``.
            options: Of the topology manager.

        Returns:
            What makes the change, if it is called before anything else happens.

        Raises:
            ConfigError: The node as it is cannot follow.
        """
        rules = configured.for_running(self._context.state.node).knowing(self._labels)
        done = self._applied(configured, options, rules)
        known = {words for value in self.policy.named().values() if (words := value.problem)}
        if new := [words for words in done.kept if words not in known]:
            raise ConfigError(f"the node cannot follow now: {'; '.join(new)}")

        def change() -> None:
            self.configured, self._options = configured, options
            self._follow(done)
            self._context.attention.set()

        return change

    def _applied(
        self, configured: Node, options: TopologyOptions, rules: Node | None = None
    ) -> AppliedPolicy:
        state = self._context.state
        policy = read_node_policy(configured, state.node.machine, self.meta, self._kubelet_cpus.manager)
        rules = rules or state.node.knowing(self._labels)
        return apply_node_policy(state, self._with_kept(policy), self.policy, options, rules)

    def _follow(self, done: AppliedPolicy) -> None:
        """Apply a policy to the state, and report what has changed."""
        context, before, old = self._context, self._context.state, self.policy.named()
        context.learn(policy=done.policy)
        if done.state is not before:
            context.store.handle(NodeRulesChanged(done.state.node, "node rules changed"))
        self._report(done)
        new = [
            f"{name} {shown(value.value) or 'none'} ({value.source})"
            for name, value in done.policy.named().items()
            if value.value != old[name].value
        ]
        if done.state is not before and new:
            context.telemetry.count(metrics.NODE_POLICY_CHANGES)
            context.telemetry.event("the policy of the node changed", values=", ".join(new))

    def _report(self, done: AppliedPolicy) -> None:
        """Report what is wrong, and end the problems of earlier passes that are over."""
        telemetry = self._context.telemetry
        problem = self._without_labels(done.state.node)
        if self._open_problem not in ("", problem):
            telemetry.resolved(NO_LABELS, reason=self._open_problem)
        if problem:
            telemetry.problem(NO_LABELS, reason=problem)
        settings = [*self._unread(), *(value.problem for value in done.policy.named().values())]
        found = {words for words in settings if words}
        for words in sorted(self._open - found):
            telemetry.resolved(CANNOT_FOLLOW, reason=words)
        for words in (*sorted(found), *done.notes):
            telemetry.problem(CANNOT_FOLLOW, reason=words)
        self._open_problem, self._open = problem, found

    def _with_kept(self, policy: NodePolicy) -> NodePolicy:
        reserved, kept = policy.reserved, self._context.state.facts.kubelet_reserved
        if kept <= reserved.value:
            return policy
        message = f"{reserved.source}, and the takeover from kubelet"
        return structs.replace(policy, reserved=PolicyValue(reserved.value | kept, message, reserved.problem))

    def _unread(self) -> list[str]:
        """Return what of the Node object could not be read."""
        if self._source is None:
            return []
        inside = self.meta.problems if self.meta is not None else ()
        return [self._source.problem, *(f"{self._source.source}: {words}" for words in inside)]

    def _without_labels(self, node: Node) -> str:
        """Return why labels of namespaces that matter are not known; empty if they are."""
        if node.admission.owners.selector.all:
            return ""
        if self._namespaces is None:
            return "clusterFacts.directory is not set"
        return self._namespaces.problem

    def page(self) -> dict[str, object]:
        """Return all values with their sources, and what is wrong with other sources, as plain data."""
        source = self._source
        return {
            "nodeObject": "" if source is None else source.source,
            "read": self.meta is not None,
            "problem": "" if source is None else source.problem,
            "values": [
                {
                    "name": name,
                    "value": shown(value.value),
                    "source": value.source,
                    "problem": value.problem,
                }
                for name, value in self.policy.named().items()
            ],
        }

    def close(self) -> None:
        """Close the source of the Node object."""
        if self._source is not None:
            self._source.close()


def shown(value: object) -> str:
    """Write a value for people; nothing for what is empty."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return ", ".join(f"{name} {ratio:g}" for name, ratio in sorted(value.items()))
    return str(value)
