"""What stands against a preferred result."""

from __future__ import annotations

from proxy.allocation.policies import PolicyDecision, usable_hints


def unpreferred(decision: PolicyDecision) -> tuple[str, ...]:
    """Return the resources without a hint that could be part of a preferred result under the policy."""
    return tuple(entry.resource for entry in decision.lists if not usable_hints(entry, decision.policy))
