"""All nodes in a form that allows quick decisions about many pods.

Theory. Deciding for one node takes the engine about a millisecond, and a pod has thousands of candidates. But
nodes are alike. Two nodes give the same verdict if they have the same hardware, policies and pending pods,
and on each NUMA node as many free CPUs, whole and broken cores, and devices. Replicas of a workload get the
same verdict too. So each node has a *class*, a number for all that a verdict depends on. The class is
computed again only when the node's objects or its pending pods change. Verdicts are kept by demand and class.
Examining a candidate is then one look-up in a table, and the engine runs only for classes that a demand has
not met: those of the nodes that have changed since.

If the counts alone decide, the engine is not called: if fewer CPUs are free than the pod owns at once, or,
under ``single-numa-node``, if fewer are free on every NUMA node than its largest container owns. A pod owns
no CPUs if the CPU manager is not static or if its QoS class owns none, unless an annotation names its CPUs.

A new demand meets many classes at once. If enough candidates fit, at most ``NEW_CLASSES_PER_ANSWER`` of them
are evaluated, and the candidates of other classes are left out of this answer, as a scheduler leaves out
nodes by ``percentageOfNodesToScore``. If too few fit, all are evaluated.

Even if a class were too coarse, the pod would not be bound in error: a bind relies on ``place``, which
decides with the CPUs themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from proxy.engine.node import Node
from proxy.model.koordinator import NumaStrategy
from proxy.model.workload import TOPOLOGY_AFFINITY
from proxy.pools.pod_fingerprint import fingerprint
from proxy.scheduler.assumed_pods import AssumedPod, AssumedPods
from proxy.scheduler.decision import FITS, NodeVerdict, evaluate, expected_node
from proxy.scheduler.node_facts import SchedulableNode, most_free_cpus, verdict_counts
from proxy.scheduler.node_row import COUNTED_RESOURCES, NOT_KNOWN, NodeRow
from proxy.scheduler.pod_demand import PodDemand
from proxy.scheduler.scores import Strategy, allocation_score, numa_strategy, volcano_scores
from proxy.scheduler.taints import Taint, tolerates

NEW_CLASSES_PER_ANSWER = 1
ENOUGH_FITTING_NODES = 16
MOST_VERDICTS = 400_000
MOST_SIGNATURES = 20_000
MOST_CLASSES = 200_000
SPARE_SHAPES = 100
"""If there are more shapes than two per node plus this many, those that no node has are forgotten."""
UNKNOWN = "UnknownNode"
NOT_EVALUATED = "NotEvaluated"
TOO_FEW_CPUS = "InsufficientCPUs"


class FilterResult(Struct, frozen=True):
    """The candidates that fit, in their order, and the reasons why the others do not."""

    fits: list[str]
    failed: dict[str, str]


class NodeTable:
    """The nodes and the assumed pods.

    Attributes:
        evaluations: How many times the engine was called.
        changed: Nodes whose class has changed; the reader empties it.
    """

    def __init__(self) -> None:
        self._rows: dict[str, NodeRow] = {}
        self._pods: dict[str, PodDemand] = {}
        self._assumed_pods = AssumedPods()
        self._classes: dict[object, int] = {}
        self._class_of: dict[str, int] = {}
        self._shapes: dict[int, tuple[Node, int]] = {}
        self._last_shape = 0
        self._with_namespace_rules: set[str] = set()
        """The nodes whose rules distinguish namespaces."""
        self._verdicts: dict[object, dict[int, NodeVerdict]] = {}
        self._verdict_count = 0
        self.evaluations = 0
        self.changed: set[str] = set()

    # -- what is known ------------------------------------------------------------------------------------

    def put(self, node: SchedulableNode, now: float = 0.0) -> None:
        """Record the facts of a node."""
        row = self._rows.setdefault(node.name, NodeRow())
        row.node, row.problem = node, ""
        self._with_namespace_rules.discard(node.name)
        if node.rules.admission.distinguish_namespaces:
            self._with_namespace_rules.add(node.name)
        row.counts, row.most_free_on_numa_node = (
            (self._shape(node.rules), *verdict_counts(node)),
            most_free_cpus(node),
        )
        self._refresh(node.name, now)
        self._confirm(node.name, now)

    def put_unknown(self, name: str, problem: str) -> None:
        """Record that nothing can be decided for a node, and why."""
        self._forget_facts(name, self._rows.setdefault(name, NodeRow()), problem)

    def put_allocatable(self, name: str, allocatable: Mapping[str, int], now: float = -inf) -> None:
        """Record the allocatable amounts of a Node object.

        Args:
            name: Of the node.
            allocatable: Thousandths of CPUs, bytes.
            now: The clock, if the Node object has just been created.
        """
        row = self._rows.setdefault(name, NodeRow())
        if not row.allocatable:
            row.joined = now
        row.allocatable = {resource: allocatable.get(resource, 0) for resource in COUNTED_RESOURCES}

    def put_taints(self, name: str, taints: tuple[Taint, ...]) -> None:
        """Record the taints of a Node object."""
        self._rows.setdefault(name, NodeRow()).taints = taints

    def remove(self, name: str) -> None:
        """Forget a node; its pods stay assumed until they are gone: the node may come back."""
        if row := self._rows.get(name):
            self._forget_facts(name, row, NOT_KNOWN)
            row.allocatable, row.taints = {}, ()
            self._drop_if_empty(name)

    def node(self, name: str) -> SchedulableNode | None:
        """Return the facts of a node; None if nothing can be decided for it."""
        row = self._rows.get(name)
        return row.node if row else None

    def assume(self, name: str, demand: PodDemand, now: float) -> None:
        """Assume a pod on a node: a bind is under way."""
        self._count(name, demand)
        if self._holds(name, demand):
            self._assumed_pods.assume(name, demand, now)
            self._refresh(name, now)

    def observe(self, demand: PodDemand, now: float, *, running: bool) -> None:
        """Record a pod that is bound (``demand.node``)."""
        self._count(demand.node, demand)
        if (row := self._rows.get(demand.node)) and row.ended.discard(demand.key):
            # The object showed the pod before the API server did.
            self._refresh(demand.node, now)
        before = self._assumed_pods.by_key(demand.key)
        if before is not None or self._holds(demand.node, demand):
            self._assumed_pods.observe(demand, now, running=running)
            if before is not None and before.node != demand.node:
                self._refresh(before.node, now)
            self._refresh(demand.node, now)
        self._confirm(demand.node, now)

    def release(self, pod: str, now: float) -> None:
        """Forget a pod: it has ended, is gone, or was not bound."""
        demand = self._pods.pop(pod, None)
        if demand is not None:
            self._subtract_pod(demand)
        if node := self._assumed_pods.drop(pod):
            if row := self._rows.get(node):
                row.ended.add(pod, row.node, now)
            self._refresh(node, now)
        if demand is not None:
            self._confirm(demand.node, now)

    def shows_ended(self, names: Collection[str], now: float) -> bool:
        """Return whether the object of a candidate still shows a pod that has ended a short while ago.

        That includes pods that had ended before the table was made. The bound pods must have been listed.
        """
        for name in names:
            if row := self._rows.get(name):
                if row.ended.compare(row.node, self._pods.keys(), now):
                    self._refresh(name, now)
                if row.ended.may_vanish(row.node, now):
                    return True
        return False

    def awaits_object(self, names: Collection[str], now: float) -> bool:
        """Return whether a candidate that joined a short while ago has no object yet."""
        rows = (self._rows[name] for name in names if name in self._rows)
        return any(row.awaits_object(now) for row in rows)

    def tick(self, now: float) -> None:
        """Forget the assumed pods that nothing will confirm."""
        for name, row in list(self._rows.items()):
            if row.ended.expire(row.node, now):
                self._refresh(name, now)
            if row.pending:
                for lost in [assumed for assumed in row.pending if assumed.is_lost(now)]:
                    self.release(lost.pod, now)
                if any(row.node and not assumed.is_pending(row.node, now) for assumed in row.pending):
                    self._refresh(name, now)

        if len(self._classes) > MOST_CLASSES:
            self._classes.clear()
            self._verdicts.clear()
            for name in self._rows:
                self._refresh(name, now)

    def pods(self, name: str) -> tuple[PodDemand, ...]:
        """Return the pods that hold CPUs or devices of a node, in the order of their binds."""
        return tuple(assumed.demand for assumed in self._assumed_pods.of(name))

    def pending(self, name: str) -> tuple[AssumedPod, ...]:
        """Return the assumed pods that the object of a node does not show."""
        row = self._rows.get(name)
        return row.pending if row else ()

    def assumed_pod(self, pod: str) -> AssumedPod | None:
        """Return the assumed pod with a key; None if it is not assumed."""
        return self._assumed_pods.by_key(pod)

    def names(self) -> Iterable[str]:
        """Return the names of all nodes."""
        return self._rows.keys()

    # -- decisions ----------------------------------------------------------------------------------------

    def filter(self, demand: PodDemand, names: Sequence[str] | None = None) -> FilterResult:
        """Return the candidates that would admit a pod.

        Args:
            demand: The pod.
            names: The candidates; None for all nodes.
        """
        names = list(self._rows) if names is None else names
        if not demand.needs_alignment:
            return FilterResult(list(names), {})
        verdicts = self.verdicts_of(demand)
        node_classes = list(map(self._class_of.get, names))
        met = set(node_classes)
        passing = {node_class for node_class in met if node_class in verdicts and verdicts[node_class].fits}
        if len(passing) == len(met):
            return FilterResult(list(names), {})
        fits = [name for name, node_class in zip(names, node_classes, strict=True) if node_class in passing]
        remaining = [
            name for name, node_class in zip(names, node_classes, strict=True) if node_class not in passing
        ]
        # Nodes with pending pods take longest, and are left out first.
        remaining.sort(key=lambda name: len(self.pending(name)))
        failed: dict[str, str] = {}
        self._evaluate_candidates(remaining, demand, fits, failed)
        return FilterResult(fits, failed)

    def scores(self, demand: PodDemand, names: Sequence[str], strategy: Strategy) -> list[int]:
        """Return the scores of candidates, 0 to 100."""
        if strategy is Strategy.FEWEST_NUMA_NODES:
            if not demand.needs_alignment:
                return [0] * len(names)
            verdicts = self.verdicts_of(demand)
            node_classes = list(map(self._class_of.get, names))
            met = set(node_classes)
            if not verdicts.keys() >= met:
                return volcano_scores(
                    [len(self.verdict(candidate, demand, verdicts).numa_nodes) for candidate in names]
                )
            count_of: dict[int | None, int] = {
                node_class: len(verdicts[node_class].numa_nodes)
                for node_class in met
                if node_class is not None
            }
            return volcano_scores(list(map(count_of.__getitem__, node_classes)))
        if numa_strategy(strategy, NumaStrategy.NONE) is None:
            return [allocation_score(self._fractions(name, demand), strategy) for name in names]
        verdicts = self.verdicts_of(demand)
        return [self._numa_score(name, demand, verdicts, strategy) for name in names]

    def place(self, name: str, demand: PodDemand) -> NodeVerdict:
        """Decide for one node, with the CPUs themselves: the bind relies on the result."""
        row = self._rows.get(name)
        if row is None or row.node is None:
            if demand.needs_alignment:
                problem = row.problem if row else NOT_KNOWN
                return NodeVerdict(fits=False, reason=UNKNOWN, message=problem)
            return FITS
        if not demand.needs_alignment:
            return FITS
        self.evaluations += 1
        if any(assumed.pod == demand.key for assumed in row.pending):  # an earlier bind of the pod
            other_demands = [assumed.demand for assumed in row.pending if assumed.pod != demand.key]
            return evaluate(demand, expected_node(row.node, other_demands, row.ended_cpus()))
        return evaluate(demand, row.expected())

    def verdicts_of(self, demand: PodDemand) -> dict[int, NodeVerdict]:
        """Return the verdicts for pods that demand the same, by class of nodes; forgotten with the object."""
        if self._verdict_count > MOST_VERDICTS or len(self._verdicts) > MOST_SIGNATURES:
            self._verdicts.clear()
            self._verdict_count = 0
        return self._verdicts.setdefault(self.signature_of(demand), {})

    def signature_of(self, demand: PodDemand) -> Hashable:
        """Return what is equal for pods that get the same verdicts from these nodes."""
        return demand.signature_for(by_namespace=bool(self._with_namespace_rules))

    def is_tainted(self, name: str, demand: PodDemand) -> bool:
        """Return whether kube-scheduler excludes a node for a pod because of its taints."""
        row = self._rows.get(name)
        return row is not None and not tolerates(demand.tolerations, row.taints)

    def known_verdict(
        self, name: str, demand: PodDemand, verdicts: Mapping[int, NodeVerdict]
    ) -> NodeVerdict | None:
        """Return the verdict for a candidate if it is known; None if the engine has to be called.

        Args:
            name: The candidate.
            demand: The pod.
            verdicts: The known verdicts for the pod (``verdicts_of``).
        """
        if not demand.needs_alignment:
            return FITS
        row, node_class = self._rows.get(name), self._class_of.get(name)
        if row is None or node_class is None:
            problem = row.problem if row else NOT_KNOWN
            return NodeVerdict(fits=False, reason=UNKNOWN, message=problem)
        verdict = verdicts.get(node_class)
        if verdict is not None:
            return verdict
        if row.owned_by(demand, demand.exclusive_cpus) > row.free:
            message = f"{row.free} CPUs are free, {demand.exclusive_cpus} are needed"
            return NodeVerdict(fits=False, reason=TOO_FEW_CPUS, message=message)
        if row.owned_by(demand, demand.largest_container_cpus) > row.most_free_on_numa_node:
            message = f"no NUMA node has {demand.largest_container_cpus} free CPUs"
            return NodeVerdict(fits=False, reason=TOPOLOGY_AFFINITY, message=message)
        return None

    def verdict(self, name: str, demand: PodDemand, verdicts: dict[int, NodeVerdict]) -> NodeVerdict:
        """Return the verdict for a candidate; the engine is called if necessary.

        Args:
            name: The candidate.
            demand: The pod.
            verdicts: The known verdicts for the pod (``verdicts_of``); a new one is added.
        """
        row = self._rows.get(name)
        if row is None or row.node is None:
            return NodeVerdict(fits=False, reason=UNKNOWN, message=row.problem if row else "")
        node_class = self._class_of[name]
        verdict = verdicts.get(node_class)
        if verdict is None:
            self.evaluations += 1
            self._verdict_count += 1
            verdict = verdicts[node_class] = evaluate(demand, row.expected())
        return verdict

    # -- inside -------------------------------------------------------------------------------------------

    def _evaluate_candidates(
        self, names: Iterable[str], demand: PodDemand, fits: list[str], failed: dict[str, str]
    ) -> None:
        """Add candidates to those that fit or to those that do not, and evaluate classes that are new."""
        verdicts = self.verdicts_of(demand)
        evaluations = 0
        for name in names:
            verdict = self.known_verdict(name, demand, verdicts)
            if verdict is None:
                if evaluations >= NEW_CLASSES_PER_ANSWER and len(fits) >= ENOUGH_FITTING_NODES:
                    failed[name] = f"{NOT_EVALUATED}: enough other nodes fit"
                    continue
                evaluations += 1
                verdict = self.verdict(name, demand, verdicts)
            if verdict.fits:
                fits.append(name)
            else:
                failed[name] = f"{verdict.reason}: {verdict.message}"

    def _count(self, name: str, demand: PodDemand) -> None:
        before = self._pods.get(demand.key)
        if before is not None and before.node == name and before.needs == demand.needs:
            return  # otherwise it was bound to another node, or resized in place
        if before is not None:
            self._subtract_pod(before)
        self._pods[demand.key] = demand if demand.node == name else replace(demand, node=name)
        self._rows.setdefault(name, NodeRow()).count(demand, 1)

    def _subtract_pod(self, demand: PodDemand) -> None:
        if row := self._rows.get(demand.node):
            row.count(demand, -1)
            self._drop_if_empty(demand.node)

    def _forget_facts(self, name: str, row: NodeRow, problem: str) -> None:
        """Forget the facts of a node, about which nothing can be decided any more."""
        row.node, row.problem, row.pending = None, problem, ()
        self._class_of.pop(name, None)
        self._with_namespace_rules.discard(name)

    def _drop_if_empty(self, name: str) -> None:
        """Forget the row of a node that does not exist as soon as no pod is bound to it."""
        row = self._rows[name]
        if not (row.pods or row.allocatable or row.node):
            del self._rows[name]

    def _holds(self, name: str, demand: PodDemand) -> bool:
        """Return whether a pod holds CPUs or devices that the object of the node shows."""
        row = self._rows.get(name)
        return demand.holds_resources or bool(row and row.node and row.node.memory and demand.holds_memory)

    def _confirm(self, name: str, now: float) -> None:
        """End the pending state of running pods if a fingerprint names exactly the pods that are bound."""
        row = self._rows.get(name)
        if row is None or row.node is None or not row.node.fingerprint:
            return
        # If another object shows CPUs, the pods that hold some are looked up there one by one.
        waiting = [
            assumed for assumed in row.pending
            if assumed.running_since is not None and (row.node.has_amounts or not assumed.demand.lasting_cpus)
        ]  # fmt: skip
        if waiting and fingerprint(row.pods.values()) == row.node.fingerprint:
            for assumed in waiting:
                self._assumed_pods.confirm(assumed)
            self._refresh(name, now)

    def _refresh(self, name: str, now: float) -> None:
        row = self._rows.get(name)
        if row is None or row.node is None:
            return
        node = row.node
        row.pending = tuple(
            assumed for assumed in self._assumed_pods.of(name) if assumed.is_pending(node, now)
        )
        row.free = len(node.free) - sum(
            row.owned_by(assumed.demand, assumed.demand.lasting_cpus) for assumed in row.pending
        )
        key = *row.counts, *row.pending_signatures(), *row.ended_cpus()
        node_class = self._classes.setdefault(key, len(self._classes))
        if self._class_of.get(name) != node_class:
            self._class_of[name] = node_class
            self.changed.add(name)

    def _shape(self, rules: Node) -> int:
        shape = self._shapes.get(id(rules))
        if shape is None or shape[0] is not rules:
            if len(self._shapes) > 2 * len(self._rows) + SPARE_SHAPES:
                used = {id(row.node.rules) for row in self._rows.values() if row.node is not None}
                self._shapes = {key: entry for key, entry in self._shapes.items() if key in used}
            self._last_shape += 1
            shape = self._shapes[id(rules)] = rules, self._last_shape
        return shape[1]

    def _numa_score(
        self, name: str, demand: PodDemand, verdicts: dict[int, NodeVerdict], strategy: Strategy
    ) -> int:
        """Score the NUMA nodes that a pod would use; the whole node if the pod is not aligned."""
        node = self.node(name)
        way = numa_strategy(strategy, node.rules.strategy if node else NumaStrategy.NONE)
        assert way is not None
        used = self.verdict(name, demand, verdicts).used if demand.needs_alignment else ()
        return allocation_score(used or self._fractions(name, demand), way)

    def _fractions(self, name: str, demand: PodDemand) -> list[float]:
        """Return the fractions of the node's CPUs and memory that would be requested."""
        row = self._rows.get(name)
        if row is None:
            return []
        return [
            (row.requested.get(resource, 0) + demand.needs.get(resource, 0)) / total
            for resource, total in row.allocatable.items()
            if total > 0
        ]
