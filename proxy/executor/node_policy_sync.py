"""The policy of the node while it runs: from the Node object, kubelet and our configuration.

All three are read at each reconcile, the Node object in a worker. A changed setting takes effect at once,
without moving owners (``proxy.engine.node_policy_applied``). A setting that cannot be applied is reported;
the old value stays in effect, and the new one is tried again each time, since owners come and go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from proxy.engine.node import Node
from proxy.engine.node_effects import NodePolicyApplied
from proxy.engine.node_events import NodePolicyRead
from proxy.engine.node_policy import NodePolicy
from proxy.engine.node_policy_applied import new_refusals
from proxy.executor.background import Worker
from proxy.executor.context import NodeContext
from proxy.model.errors import ConfigError
from proxy.model.kubelet import NodeMeta
from proxy.model.options import TopologyOptions
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from proxy.executor.ports import NamespaceLabels, NodeObject

NO_LABELS = "cannot read the labels of namespaces, which admission.namespaceSelector needs"
CANNOT_FOLLOW = "cannot follow a setting of the Node object"


class NodePolicySync:
    """Reads the sources of the node's rules, and reports what has changed and what is wrong.

    Attributes:
        configured: The node as our configuration has it, on the machine of the start.
    """

    def __init__(
        self,
        context: NodeContext,
        configured: Node,
        source: NodeObject | None = None,
        options: TopologyOptions | None = None,
        namespaces: NamespaceLabels | None = None,
    ) -> None:
        """Begin with our configuration alone.

        Args:
            context: Has the rules.
            configured: The node as our configuration has it.
            source: Where the Node object is; None for none.
            options: The options of the topology manager, as our configuration has them.
            namespaces: Where labels of namespaces are; None for none.
        """
        self._context = context
        self.configured = configured
        self._source = source
        self._options = options or TopologyOptions()
        self._namespaces = namespaces
        self._labels: Mapping[str, Mapping[str, str]] | None = None
        self._reading = asyncio.Lock()
        self._open_problem = ""
        self._open = set[str]()
        context.store.handle(self._read(configured, self._options))

    @property
    def policy(self) -> NodePolicy:
        """The policy in effect."""
        policy = self._context.state.facts.policy
        assert policy is not None
        return policy

    @property
    def meta(self) -> NodeMeta | None:
        """The newest Node object read; None if there is none, or it could never be read."""
        return self._context.state.facts.node_meta

    async def refresh(self, worker: Worker) -> None:
        """Read the Node object and the labels of namespaces in a worker, and apply them."""
        try:
            meta = None
            async with self._reading:
                if self._source is not None:
                    meta = await worker.run(self._source.read)
                if self._namespaces is not None:
                    self._labels = await worker.run(self._namespaces.read)
            self._apply_read(NodePolicyRead(self.configured, self._options, meta, self._labels))
        except Exception as error:  # noqa: BLE001 - an internal error must not stop the reconcile
            self._context.report_internal_error(error)

    def apply(self) -> None:
        """Apply the policy that follows from the known facts."""
        self._apply_read(self._read(self.configured, self._options))

    def reconfigured(self, configured: Node, options: TopologyOptions) -> Callable[[], None]:
        """Prepare for another configuration of topoproxy.

        Args:
            configured: The node as the new configuration has it, on the machine of ``configured``.
            options: The options of the topology manager.

        Returns:
            A function that makes the change; it must be called before anything else happens.

        Raises:
            ConfigError: The node in its current state cannot follow.
        """
        if new := new_refusals(self._context.state, self._read(configured, options)):
            raise ConfigError(f"the node cannot follow now: {'; '.join(new)}")

        def change() -> None:
            self.configured, self._options = configured, options
            self.apply()
            self._context.reconcile_requested.set()

        return change

    def _read(self, configured: Node, options: TopologyOptions) -> NodePolicyRead:
        return NodePolicyRead(configured, options, self.meta, self._labels)

    def _apply_read(self, read: NodePolicyRead) -> None:
        """Have a policy take effect, and report what has changed."""
        telemetry = self._context.telemetry
        for effect in self._context.store.handle(read):
            if type(effect) is NodePolicyApplied:
                self._report(effect.notes)
                if new := effect.changed:
                    texts = (f"{name} {shown(at.value) or 'none'} ({at.source})" for name, at in new.items())
                    telemetry.count(metrics.NODE_POLICY_CHANGES)
                    telemetry.event("the policy of the node changed", values=", ".join(texts))

    def _report(self, notes: Iterable[str]) -> None:
        """Report what is wrong, and end the problems of earlier reconciles that are over."""
        telemetry = self._context.telemetry
        problem = self._without_labels(self._context.state.node)
        if self._open_problem not in ("", problem):
            telemetry.resolved(NO_LABELS, reason=self._open_problem)
        if problem:
            telemetry.problem(NO_LABELS, reason=problem)
        settings = [*self._unread(), *(value.problem for value in self.policy.named().values())]
        found = {text for text in settings if text}
        for text in sorted(self._open - found):
            telemetry.resolved(CANNOT_FOLLOW, reason=text)
        for text in (*sorted(found), *notes):
            telemetry.problem(CANNOT_FOLLOW, reason=text)
        self._open_problem, self._open = problem, found

    def _unread(self) -> list[str]:
        """Return why parts of the Node object could not be read."""
        if self._source is None:
            return []
        inside = self.meta.problems if self.meta is not None else ()
        return [self._source.problem, *(f"{self._source.source}: {problem}" for problem in inside)]

    def _without_labels(self, node: Node) -> str:
        """Return why labels of namespaces that matter are unknown; empty if they are known."""
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
    """Return a value as text, for display; empty for an empty value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return ", ".join(f"{name} {ratio:g}" for name, ratio in sorted(value.items()))
    return str(value)
