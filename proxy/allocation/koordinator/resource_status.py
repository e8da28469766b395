"""Write a decision as the annotation ``scheduling.koordinator.sh/resource-status``.

Source: koordinator a7a1b76, apis/extension/resource.go ``ResourceStatus``. ``proxy.pools.annotations`` reads
it back. Amounts are written as Kubernetes writes them: CPU in CPUs or thousandths, memory in powers of 1024,
anything else in powers of 1000.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from proxy.allocation.koordinator.node_shares import CPU, Amounts
from proxy.model.idset import CpuSet
from proxy.model.quantity import show_quantity

_THOUSANDS = "kMGTPE"
_BYTES = ("memory", "hugepages-", "ephemeral-storage")


def status_text(cpus: CpuSet | None = None, shares: Mapping[int, Amounts] | None = None) -> str:
    """Return the annotation for the CPUs and amounts that a pod was assigned.

    Args:
        cpus: Its exclusive CPUs, if it has any.
        shares: NUMA node to the amounts assigned there, see ``proxy.allocation.koordinator.node_shares``.

    Returns:
        JSON without blanks; empty parts are left out.
    """
    status: dict[str, object] = {}
    if cpus:
        status["cpuset"] = str(cpus)
    if shares:
        status["numaNodeResources"] = [
            {"node": node, "resources": {name: show(name, own[name]) for name in sorted(own)}}
            for node, own in sorted(shares.items())
        ]
    return json.dumps(status, separators=(",", ":"))


def show(resource: str, amount: int) -> str:
    """Write an amount of a resource (CPU in thousandths) as Kubernetes does."""
    if resource == CPU:
        return show_quantity(amount, milli=True)
    if resource.startswith(_BYTES):
        return show_quantity(amount)
    power = 0
    while amount and amount % 1000 == 0 and power < len(_THOUSANDS):
        amount //= 1000
        power += 1
    return f"{amount}{_THOUSANDS[power - 1] if power else ''}"
