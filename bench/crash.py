"""Kills the daemon (SIGKILL) at every step of a day, and at random moments of a busy day.

    make crash                                    the steps, and 500 moments
    .venv/bin/python bench/crash.py --steps       every step once
    .venv/bin/python bench/crash.py --moments 50  as many random moments
    .venv/bin/python bench/crash.py --jobs 1      one node after the other, not several at the same time

The runtime and the cgroup tree are imitated (``faulty_node``), the daemon is the real one. After each end of
a daemon another one is started on the remaining state. Counted are: containers that run on CPUs of a running
owner (checked all the time, even while no daemon runs), owners that the next daemon does not know, containers
without CPUs, containers that are not where they belong some seconds later (astray), and the time from the
start of the process until calls are decided again. The time for which the first thread waits for a CPU is
subtracted if the kernel reports it: other processes cause that wait, not the daemon.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from faulty import MOVE_SHARES
from faulty_node import KINDS, FaultyNode, new_node
from procs import BenchError
from table import number, render

from proxy.api.cri import api_pb2 as pb
from proxy.demo.client import CriClient
from proxy.model.errors import TopoproxyError, UnavailableError

READY_BAR_S = 1.0
CLIENTS = 4
MOVE_LIMIT_S = 30.0
"""How long the move of an owner may take, with the update of the runtime."""
SETTLE_EVERY = 10
"""After this many moments the run waits until each container is where it belongs."""
LS, LSE, WHOLE = KINDS[0], KINDS[3], KINDS[5]


@dataclass
class CrashResult:
    """The results.

    Attributes:
        kills: How often the daemon was killed.
        overlaps, lost, astray: Messages about violations.
        ready_s: Seconds until calls were decided again, one for each start.
    """

    kills: int = 0
    overlaps: set[str] = field(default_factory=set)
    lost: list[str] = field(default_factory=list)
    astray: list[str] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)

    @property
    def broken(self) -> bool:
        return bool(self.overlaps or self.lost or self.astray)

    def add(self, other: CrashResult) -> None:
        """Add the results of another node."""
        self.kills += other.kills
        self.overlaps |= other.overlaps
        self.lost += other.lost
        self.astray += other.astray
        self.ready_s += other.ready_s

    def __str__(self) -> str:
        late = sorted(self.ready_s)
        times = f", ready p50 {late[len(late) // 2]:.2f} s, max {late[-1]:.2f} s" if late else ""
        return f"{len(self.overlaps)} overlaps, {len(self.lost)} lost, {len(self.astray)} astray{times}"

    def row(self, what: str) -> list[str]:
        late = sorted(self.ready_s)
        none = sum("no CPUs" in message for message in self.overlaps)
        return [
            what,
            str(self.kills),
            str(len(self.overlaps) - none),
            str(len(self.lost)),
            str(none),
            str(len(self.astray)),
            number(late[len(late) // 2] if late else None, "s"),
            number(late[-1] if late else None, "s"),
        ]


HEAD = ("killed", "times", "overlaps", "lost owners", "without CPUs", "astray", "ready p50", "ready max")


@contextlib.contextmanager
def overlaps_checked(node: FaultyNode, found: CrashResult) -> Iterator[None]:
    """Check for overlaps continuously within the block."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.004):
            with contextlib.suppress(TopoproxyError):  # a group that disappears while it is read
                found.overlaps.update(node.overlaps())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def restart_daemon(node: FaultyNode, found: CrashResult) -> None:
    """Start the next daemon, and record the owners that it does not know."""
    found.ready_s.append(node.start())
    found.lost += node.lost_owners()


# -- steps ------------------------------------------------------------------------------------------------


def scenario(node: FaultyNode, client: CriClient, shared: str) -> None:
    """A day with all relevant events: owners with named and with chosen CPUs arrive, one moves, one ends."""
    pod = node.pod(client, LSE)
    named = node.create(client, pod, 0)
    client.start(named)
    client.update(shared, pb.LinuxContainerResources(cpuset_cpus="0-15", cpu_shares=100))
    other = node.pod(client, WHOLE)
    moving = node.create(client, other, 0)
    client.start(moving)
    move(node, client, moving)
    client.stop(named)
    client.remove(named)
    client.end_pod(pod)
    client.end_pod(other)


def move(node: FaultyNode, client: CriClient, container_id: str) -> None:
    """Move an owner to other CPUs, and wait until it runs there and the runtime has the new set."""
    record = node.runtime.containers[container_id]
    before = node.cgroups.read(record.cgroup).cpus
    node.moved.add(container_id)
    client.update(container_id, pb.LinuxContainerResources(cpu_shares=MOVE_SHARES))
    end = time.monotonic() + MOVE_LIMIT_S
    while node.alive and time.monotonic() < end:
        on = node.cgroups.read(record.cgroup).cpus
        if on != before and record.resources.cpuset_cpus == str(on):
            return
        time.sleep(0.01)
    if node.alive:
        raise BenchError(f"cannot move a container: {node.log()}")
    raise UnavailableError("the daemon has ended")


def set_faults(node: FaultyNode, **faults: object) -> None:
    """Set the faults that the daemon meets from the next call on."""
    new = node.directory / "orders.new"
    new.write_text(json.dumps(faults | {"number": next(node.numbers)}))
    new.replace(node.directory / "orders")


def kill_at_step(node: FaultyNode, found: CrashResult, step: int) -> bool:
    """Run a scenario up to a step; return False if it has no such step."""
    set_faults(node, kill_at=step)
    shared = next(i for i, r in node.runtime.containers.items() if r.state == pb.CONTAINER_RUNNING)
    with CriClient(str(node.socket), timeout=10) as client:
        try:
            scenario(node, client, shared)
        except UnavailableError:
            node.wait_until(lambda: not node.alive, 10, f"the end at step {step}")
        else:
            return False
        finally:
            set_faults(node, kill_at=0)
    found.kills += 1
    restart_daemon(node, found)
    found.astray += [f"step {step}: {what}" for what in node.wait_until_settled()]
    with CriClient(str(node.socket)) as client:
        for pod in list(node.runtime.pods.values()):
            if pod.config.metadata.name.startswith((f"{LSE.name}-", f"{WHOLE.name}-")):
                client.end_pod(pod.id)
    found.astray += [f"after step {step}: {what}" for what in node.wait_until_settled()]
    return True


def steps(every: int = 1, part: int = 0, parts: int = 1) -> tuple[CrashResult, list[str]]:
    """Kill the daemon at each step of the scenario, or at some; the next daemon runs the next day."""
    found = CrashResult()
    with tempfile.TemporaryDirectory(prefix="cr") as directory, new_node(Path(directory)) as node:
        node.faults = {"orders": str(node.directory / "orders")}
        node.start()
        with CriClient(str(node.socket)) as client:
            for kind in (KINDS[0], KINDS[1], KINDS[2]):
                client.start(node.create(client, node.pod(client, kind), 0))
            trace = node.directory / "steps"
            set_faults(node, kill_at=0, steps=str(trace))
            with overlaps_checked(node, found):
                shared = next(iter(node.runtime.containers))
                scenario(node, client, shared)
        names = trace.read_text().splitlines()
        restart_daemon(node, found)
        with overlaps_checked(node, found):
            mine = range(1 + part * every, len(names) + 1, every * parts)
            for done, step in enumerate(mine, 1):
                kill_at_step(node, found, step)
                if done % SETTLE_EVERY == 0 or step == mine[-1]:
                    progress(f"step {step} of {len(names)}, {names[step - 1]}: {found}")
    return found, names


# -- moments ----------------------------------------------------------------------------------------------


def make_changes(node: FaultyNode, seed: int, over: threading.Event) -> None:
    """A client that makes one change after the other to some pods, until the daemon is gone."""
    dice = random.Random(seed)
    with CriClient(str(node.socket), timeout=10) as client:
        while not over.is_set():
            try:
                make_change(node, client, dice, seed % CLIENTS)
            except UnavailableError:
                return
            except (TopoproxyError, KeyError):
                continue  # the call was refused, or the pod is another client's


def make_change(node: FaultyNode, client: CriClient, dice: random.Random, client_number: int) -> None:
    """Make one change. Each client has its own pods, as kubelet has one worker for each pod."""
    pods = [
        p
        for p in node.runtime.pods.values()
        if int(p.config.metadata.name.rpartition("-")[2]) % CLIENTS == client_number
    ]
    if len(pods) < 2 or (len(pods) < 4 and dice.random() < 0.2):
        node.pod(client, dice.choice(KINDS))
        return
    pod = dice.choice(pods)
    if dice.random() < 0.1:
        client.end_pod(pod.id)
        return
    inside = [r for r in node.runtime.containers.values() if r.pod_id == pod.id]
    live = [r for r in inside if r.state != pb.CONTAINER_EXITED]
    if not live:
        for old in inside:
            client.remove(old.id)
        node.create(client, pod.id, dice.randrange(10**6))
        return
    record = dice.choice(live)
    if record.state == pb.CONTAINER_CREATED:
        client.start(record.id)
    elif dice.random() < 0.5:
        client.update(record.id, pb.LinuxContainerResources(cpuset_cpus="0-15", cpu_shares=100))
    else:
        client.stop(record.id)


def moments(count: int, seed: int = 1) -> CrashResult:
    """Kill the daemon at random moments under churn."""
    dice, found = random.Random(seed), CrashResult()
    with tempfile.TemporaryDirectory(prefix="cr") as directory, new_node(Path(directory)) as node:
        slow = random.Random(seed)
        for method in ("CreateContainer", "StartContainer", "UpdateContainerResources"):
            node.runtime.before(method, lambda _: time.sleep(slow.choice((0, 0, 0.005, 0.03))))
        with overlaps_checked(node, found):
            restart_daemon(node, found)
            for turn in range(count):
                over = threading.Event()
                clients = [
                    threading.Thread(target=make_changes, args=(node, turn * CLIENTS + i, over))
                    for i in range(CLIENTS)
                ]
                for thread in clients:
                    thread.start()
                time.sleep(dice.uniform(0.01, 0.4))
                node.kill()
                over.set()
                for thread in clients:
                    thread.join()
                found.kills += 1
                restart_daemon(node, found)
                if turn % SETTLE_EVERY == SETTLE_EVERY - 1 or turn == count - 1:
                    found.astray += node.wait_until_settled()
                    progress(f"moment {turn + 1} of {count}: {found}")
    return found


# -- some nodes at the same time --------------------------------------------------------------------------


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def steps_part(job: tuple[int, int, int]) -> tuple[CrashResult, int]:
    """Make one node's share of the steps."""
    found, names = steps(*job)
    return found, len(names)


def moments_part(job: tuple[int, int]) -> CrashResult:
    """Make one node's share of the moments."""
    return moments(*job)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", action="store_true", help="every step of a day, and no moments unless --moments is given"
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every Nth step")
    parser.add_argument("--moments", type=int, metavar="N", help="so many random moments (500)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="nodes at the same time")
    chosen = parser.parse_args()
    jobs, rows, every, begun = max(1, chosen.jobs), [], list[CrashResult](), time.monotonic()
    # A fork of a process in which gRPC runs hangs; and threads of one node must not affect another node.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        if chosen.steps or chosen.moments is None:
            found, count = CrashResult(), 0
            for part_found, names in pool.map(
                steps_part, [(chosen.every, part, jobs) for part in range(jobs)]
            ):
                found.add(part_found)
                count = max(count, names)
            every.append(found)
            what = f"at each of {count} steps" + (f", every {chosen.every}." * (chosen.every > 1))
            rows.append(found.row(what))
        if chosen.moments or (chosen.moments is None and not chosen.steps):
            found, count = CrashResult(), chosen.moments or 500
            shares = [(count + part) // jobs for part in range(jobs)]
            for other in pool.map(
                moments_part, [(n, chosen.seed + at * 1000) for at, n in enumerate(shares) if n]
            ):
                found.add(other)
            every.append(found)
            rows.append(found.row("at random moments"))
    print(render(HEAD, rows))
    took = time.monotonic() - begun
    print(f"\nBars: 0 of all, ready within {READY_BAR_S:g} s. {jobs} nodes at a time, {took:.0f} s in all.")
    for found in every:
        for message in (*sorted(found.overlaps), *found.lost, *found.astray):
            print(f"  {message}")
    slow = any(sorted(found.ready_s)[len(found.ready_s) // 2] > READY_BAR_S for found in every)
    return int(slow or any(found.broken for found in every))


if __name__ == "__main__":
    sys.exit(main())
