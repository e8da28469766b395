"""Figures of the extender: answers at 1,000 and 5,000 nodes, memory, and pods bound a second.

    make bench-scheduler [CASES="answers rates peers"]

Answers are those of the service, from the bytes of a request to the bytes of its answer, while pods are
promised to the nodes; their times are those of the processor. Pods a second are those of the real
kube-scheduler with the extender and without, on one fleet in one run; without the programs of
TOPOPROXY_CLUSTER that part is left out. The case ``peers`` is that of tests/cluster/peer_figures.py.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from proxy import logs
from proxy.extender.cluster_view import ClusterView
from proxy.extender.lease import Lease
from proxy.extender.retries import PodRetries
from proxy.extender.service import ExtenderService
from proxy.scheduler.node_facts import join_facts
from proxy.scheduler.node_table import NodeTable
from proxy.scheduler.numatopology import read_numatopology
from proxy.scheduler.pod_demand import read_demand
from proxy.scheduler.scores import Strategy
from tests.cluster.control_plane import control_plane_skip_reason
from tests.cluster.extender_process import SCHEDULER
from tests.cluster.peer_figures import print_peers
from tests.cluster.scheduling_cluster import SIZES as BURST_SIZES
from tests.cluster.scheduling_cluster import scheduling_cluster
from tests.extender.running_extender import ClusterApi, scheduler_pod
from tests.scheduler.objects import Json, numatopology, pod

NUMA_NODES, CORES = 4, 16
SIZES = (2, 4, 8, 16)
TURNS = 2
RATES = ((50, 400), (50, 460), (500, 1200), (1000, 600))
"""Nodes and pods."""
UNSHOWN = 60
"""Pods whose promises are pending: those of a second."""


class AlwaysHeld(Lease):
    """A lease that needs no API server."""

    held = True  # type: ignore[assignment]


class CurrentView(ClusterView):
    """A view that is current, whatever it has read."""

    age = 0.0  # type: ignore[assignment]


def object_of(name: str, pods: dict[str, str], free: str) -> Json:
    return numatopology(name, numa_nodes=NUMA_NODES, cores=CORES, free=free, pods=pods)


def filled_table(nodes: int, pods_each: int, chance: random.Random) -> NodeTable:
    """Return nodes of 128 CPUs, on each of which some pods own CPUs and others share."""
    table = NodeTable()
    per = 2 * CORES
    for number in range(nodes):
        name, held, free = f"n{number}", dict[str, str](), list[str]()
        for numa in range(NUMA_NODES):
            at, end = numa * per + (numa == 0) * 2, (numa + 1) * per
            while at < end and chance.random() < 0.6:
                size = min(chance.choice(SIZES), end - at)
                uid = f"{name}-{at}"
                held[uid] = f"{at}-{at + size - 1}"
                table.observe(read_demand(pod(uid, size, node=name)), 0.0, running=True)
                at += size
            if at < end:
                free.append(f"{at}-{end - 1}")
        for shared in range(pods_each - len(held)):
            table.observe(read_demand(pod(f"{name}-s{shared}", "100m", node=name)), 0.0, running=True)
        raw = object_of(name, held, ",".join(free))
        table.put(join_facts(name, None, read_numatopology(raw), None))
    return table


async def answers(table: NodeTable, nodes: int, requests: int, chance: random.Random) -> list[float]:
    """Return seconds of the processor for filter and prioritize of one pod after the other."""
    telemetry, client = logs.telemetry(), ClusterApi().client()
    view = CurrentView(client, table, telemetry)
    lease = AlwaysHeld(client, "default", "extender", "me", telemetry)
    retries = PodRetries(client, table, "default", "extender", telemetry)
    service = ExtenderService(client, table, view, lease, retries, telemetry, Strategy.FEWEST_NUMA_NODES)
    names = [f"n{number}" for number in range(nodes)]
    found = []
    for number in range(requests):
        raw = scheduler_pod(f"p{number}", chance.choice(SIZES))
        body = msgspec.json.encode({"Pod": raw, "Nodes": None, "NodeNames": names})
        began = time.process_time()
        fits = (await service.handle("POST", "/filter", body, True)).value
        msgspec.json.encode(fits)
        kept = fits.get("NodeNames", [])  # type: ignore[attr-defined]
        body = msgspec.json.encode({"Pod": raw, "Nodes": None, "NodeNames": kept})
        msgspec.json.encode((await service.handle("POST", "/prioritize", body, True)).value)
        found.append(time.process_time() - began)
        if kept:
            table.assume(chance.choice(kept), read_demand({**pod("x", 2), **raw}), 0.0)
        table.release(f"p{number - UNSHOWN}", 0.0)
    return found


def resident_mib() -> float:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def print_answers(nodes: int, pods_each: int = 20, requests: int = 300) -> None:
    chance = random.Random(7)
    before = resident_mib()
    began = time.perf_counter()
    table = filled_table(nodes, pods_each, chance)
    gc.collect()
    gc.freeze()
    grown, took = resident_mib() - before, time.perf_counter() - began
    seconds = asyncio.run(answers(table, nodes, requests, chance))
    cut = statistics.quantiles(seconds, n=100)
    print(
        f"{nodes} nodes of 128 CPUs, {nodes * pods_each} pods: filter and prioritize "
        f"p50 {cut[49] * 1e3:.1f} ms, p99 {cut[98] * 1e3:.1f} ms, worst {max(seconds) * 1e3:.1f} ms; "
        f"{grown:.0f} MiB, read in {took:.0f} s; {table.evaluations} decisions by the engine"
    )


def print_rates(nodes: int, pods: int) -> None:
    """Print pods bound a second, those that run and those that were rejected, of both schedulers in turn."""
    chance = random.Random(3)
    sizes = [chance.choice(BURST_SIZES) for _ in range(pods)]
    rates: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        scheduling_cluster(Path(directory), nodes) as scheduling,
    ):
        for turn in range(2 * TURNS):
            name, scheduler = (("stock", "default-scheduler"), ("with the extender", SCHEDULER))[turn % 2]
            began = time.monotonic()
            scheduling.fleet.create_pods(f"{name.replace(' ', '-')}-{turn}-", sizes, scheduler)
            scheduling.fleet.until_settled(pods)
            rates.setdefault(name, []).append(scheduling.fleet.rate(began))
            figures = (
                f"{scheduling.fleet.figures(pods)}, {scheduling.fleet.double_bookings()} CPUs promised twice"
            )
            print(f"{nodes} nodes, {name}: {rates[name][-1]:.0f} pods a second; {figures}")
            scheduling.fleet.clear()
        ours, stock = (statistics.harmonic_mean(rates[name]) for name in ("with the extender", "stock"))
        print(f"{nodes} nodes: {ours / stock:.2f} of the rate of the stock scheduler", end="")
        print(
            f"; the extender has {scheduling.extender.resident_mib():.0f} MiB; load {os.getloadavg()[0]:.1f}"
        )


def print_all_rates() -> None:
    if reason := control_plane_skip_reason("kube-scheduler"):
        print(f"pods a second: {reason}")
        return
    for nodes, pods in RATES:
        print_rates(nodes, pods)


def print_all_answers() -> None:
    for nodes in (1000, 5000):
        print_answers(nodes)


CASES = {"answers": print_all_answers, "rates": print_all_rates, "peers": print_peers}


def main() -> None:
    """Print the figures of the cases that are named; without a name those of the extender."""
    for case in sys.argv[1:] or ("answers", "rates"):
        CASES[case]()


if __name__ == "__main__":
    sys.exit(main())
