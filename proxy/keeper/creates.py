"""Deciding creates, and taking the CPUs.

The order of a create that gives CPUs away:

    decide (the state already says that the CPUs are taken)
    -> ledger: the placement, in flight
    -> wait for calls in flight that carry wider sets (flights)
    -> kernel: others leave the CPUs, read back
    -> the request goes on; the runtime's id arrives -> ledger: the placement, for good

Deciding is pure and done at once; everything that can block (ledger, kernel, runtime) is done by workers and
awaited. A create that fails takes its container out of the state again (``lifecycle``), and the containers
that had moved are moved back. Because every kernel write uses the newest state, plans of different pods need
no lock between them. What is done when a container cannot be moved is in ``clearing``.
"""

from __future__ import annotations

import dataclasses

from proxy.keeper.context import NodeContext
from proxy.keeper.entrusted import Entrusted
from proxy.keeper.store import Follow
from proxy.model.defects import InputDefect
from proxy.model.workload import Pod, Pool, Request
from proxy.plan.place import Plan, place


class Creates:
    """Decides creates."""

    def __init__(self, keeper: NodeContext, entrusted: Entrusted) -> None:
        self._keeper = keeper
        self._entrusted = entrusted

    def place(self, pod: Pod, name: str, attempt: int, request: Request) -> Plan:
        """Decide a create and take the CPUs; ``clearing.clear`` must follow where the container owns some."""
        keeper = self._keeper
        request, again = self._entrusted.back(pod, name, attempt, request)
        token = keeper.token("call")
        plan = place(keeper.state, pod, name, attempt, request, token)
        if plan.problem or pod.defects or plan.container is None:
            plan = self._judged(plan, pod, name)
        if plan.container is None:
            keeper.counters["creates_refused"] += 1
            if plan.explanation is not None:
                keeper.history.note(keeper.wall(), plan.explanation)
            words = f"refused {pod.ref}/{name}: {plan.verdict.operator_message}"
            keeper.refusals.say((pod.ref, name), words)
            return plan
        return self.take(plan, again=again)

    def take(self, plan: Plan, *, again: bool = False) -> Plan:
        """Have what a plan that admits says be so; ``again``: it was placed, and counted, before."""
        keeper, container = self._keeper, plan.container
        assert container is not None
        # ``clear`` writes the containers that leave an owner's CPUs, and waits for that.
        follow = Follow.CALLER if container.placement.pool is Pool.OWN else Follow.MOVED
        keeper.store.change(plan.state, "container placed", follow=follow)
        wanted = keeper.saved[container.id] = keeper.state.wanted(container)
        self.remember(plan)
        if not again:
            keeper.counters["creates_placed"] += 1
        if container.placement.pool is Pool.OWN or keeper.voice.chatty:
            say = keeper.voice.info if container.placement.pool is Pool.OWN else keeper.voice.debug
            say(f"placed {container.ref} on {wanted}: {container.placement.reasons[0]}")
        return plan

    def _judged(self, plan: Plan, pod: Pod, name: str) -> Plan:
        """Report what was wrong with what was asked, here and in the record."""
        keeper = self._keeper
        keeper.bad_input.judge(pod, plan)
        words = plan.problem or plan.verdict.operator_message
        keeper.bad_input.limited(pod, plan.limit, words, admitted=plan.verdict.admitted)
        if not plan.problem:
            return plan
        if not isinstance(plan.problem, InputDefect):
            keeper.problems.note(f"{pod.ref}/{name}: {plan.problem}")
        why = plan.explanation
        if why is None or plan.problem in pod.defects or any(plan.problem in told for told in why.reasons):
            return plan
        return dataclasses.replace(
            plan, explanation=dataclasses.replace(why, reasons=(*why.reasons, plan.problem))
        )

    def remember(self, plan: Plan) -> None:
        """Keep the record of a decision."""
        keeper = self._keeper
        assert plan.container is not None
        if plan.explanation is not None:
            keeper.history.note(keeper.wall(), plan.explanation, plan.container.id)
        else:
            wanted = keeper.state.wanted(plan.container)
            keeper.history.note_simple(keeper.wall(), plan.container, wanted)
