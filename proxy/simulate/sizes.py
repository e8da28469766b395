"""Machines that are too small for a pod, however empty they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from proxy.allocation.cpu_request import pod_cpus
from proxy.model.phrases import counted
from proxy.observe.value_text import clean
from proxy.simulate.cluster import Fate
from proxy.simulate.rehearsal import Rehearsal


def too_small(rehearsal: Rehearsal) -> Iterator[str]:
    """Name the machines that never have as many CPUs as pods wanted that were refused on them.

    Yields:
        A sentence for each machine and number of CPUs.
    """
    hosts = {host.name: host for host in rehearsal.hosts}
    refused: Counter[tuple[str, int]] = Counter()
    for result in rehearsal.results:
        asks = result.guest.arrival.pod.asks
        host = hosts.get(result.host)
        if result.fate is Fate.REFUSED and asks is not None and host is not None and host.node.static:
            refused[host.name, pod_cpus(asks)] += 1
    for (name, wanted), count in refused.items():
        node = hosts[name].node
        if wanted > node.most_ownable:
            yield (
                f"{clean(name)} is too small for {counted(count, 'pod')} that asked for {wanted} CPUs of"
                f" {'its' if count == 1 else 'their'} own: of its {counted(len(node.machine.online), 'CPU')},"
                f" {node.most_ownable} can be owned"
            )
