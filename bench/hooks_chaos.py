"""Ten thousand calls while hooks hang, crash, lie and flood: a command by itself

    .venv/bin/python bench/hooks_chaos.py                some minutes
    .venv/bin/python bench/hooks_chaos.py --calls 1000   fewer

Eight clients call the real daemon at the same time. Seven hook files and a hook server run at each call, and
most of them misbehave sometimes in random ways. One of them is correct, and its changes must be in every
created container. A thread checks continuously whether a running container has CPUs of a running owner; at
the end each container must have its expected CPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from churn import Churn, ChurnClient, end_remaining_pods, memory_mb
from crash import CrashResult, overlaps_checked, progress
from faulty_node import KINDS, FaultyNode, new_node
from procs import BENCH, BenchError, environment
from table import number, render

from proxy.demo.client import CriClient

CALLS, CLIENTS, TIMEOUT_S = 10_000, 8, 0.1
CALLS_OF_A_COUNT = 1.7
"""The number counts creates, updates and removals; sandboxes, starts and ends are made in addition."""
HUNG_S = 10.0
"""A call that takes longer counts as hanging: its hooks may take a second together, and creates wait for each
other."""

HEAD_OF_ALL = """
import random, threading, time
from proxy.hooks.api import *

API_VERSION = 1
DICE = random.Random(__name__)
LOCK = threading.Lock()


def now_and_then():
    with LOCK:
        return DICE.random() < {share}


def one_of(*choices):
    with LOCK:
        return DICE.choice(choices)
"""
EVERYWHERE = """

def pre_run_pod_sandbox(event): return bad(event)
def pre_create_container(event): return bad(event)
def post_create_container(event): return bad(event)
def pre_start_container(event): return bad(event)
def post_start_container(event): return bad(event)
def pre_update_container_resources(event): return bad(event)
def post_update_container_resources(event): return bad(event)
def pre_stop_container(event): return bad(event)
def post_stop_container(event): return bad(event)
def post_remove_container(event): return bad(event)
def post_stop_pod_sandbox(event): return bad(event)
def pools_changed(event): return bad(event)
def synchronize(event): return bad(event)
def validate_create_container(event): return bad(event)
"""
GOOD = """
FAILURE_POLICY = "Fail"


def pre_create_container(event):
    return Adjustment(annotations={"good": "yes"})
"""
HANGS = """
def bad(event):
    if now_and_then():
        how = one_of("sleep", "spin", "lock")
        if how == "sleep":
            time.sleep(20)
        while how == "spin":
            pass
        if how == "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire(timeout=20)
"""
CRASHES = """
class Odd(BaseException):
    def __str__(self): raise ValueError("no words")


def bad(event):
    if now_and_then():
        odd = (ValueError("x" * 100000), SystemExit(3), KeyboardInterrupt(), Odd(), MemoryError())
        how = one_of(*odd, "deep")
        if how == "deep":
            return bad_again(event)
        raise how


def bad_again(event): return bad_again(event)
"""
LIES = """
def bad(event):
    if not now_and_then():
        return None
    decision = getattr(event, "decision", None)
    others = CpuSet(range(16)) - decision.allowed if decision is not None else CpuSet()
    return one_of(
        7, "no", object(), [], Adjustment, Veto, Veto(None),
        Adjustment(cpus="0-3"), Adjustment(cpus=CpuSet()), Adjustment(cpus=others or CpuSet((999,))),
        Adjustment(cpus=CpuSet((1023,))), Adjustment(mems=Mask((60,))), Adjustment(mems=Mask()),
        Adjustment(cpu_quota=True), Adjustment(cpu_quota=-7), Adjustment(oom_score_adj=10**30),
        Adjustment(envs=None), Adjustment(envs={1: 2}), Adjustment(envs={"A=B": "c"}),
        Adjustment(annotations={"good": "no"}), Adjustment(labels={"a": "b\\0"}),
        Adjustment(cgroup_parent="/"),
        Adjustment(unified={"cpuset.cpus": "0-15"}), Adjustment(unified={"../cpuset.cpus": "0-15"}),
        Adjustment(updates=7), Adjustment(updates={"unknown": Update(cpus=CpuSet((0,)))}),
        Adjustment(mounts={"x": None}), Adjustment(devices={"/dev/x": 3}),
    )
"""
FLOODS = """
import logging

KNOWN = set()


def bad(event):
    container = getattr(event, "container", None)
    if container is not None and container.id and len(KNOWN) < 64:
        KNOWN.add(container.id)
    if not now_and_then():
        return None
    how = one_of("log", "large", "many", "updates", "memory")
    if how == "log":
        for number in range(3000):
            logging.getLogger(__name__).warning("flood %d of %r", number, event)
    if how == "large":
        return Adjustment(annotations={"large": "x" * (8 << 20)})
    if how == "many":
        return Adjustment(annotations={str(number): "x" for number in range(100000)})
    if how == "updates":
        everything = Update(cpus=CpuSet(range(16)), cpu_shares=100)
        return Adjustment(updates={one: everything for one in list(KNOWN)})
    if how == "memory":
        return Adjustment(annotations={"a": str([0] * 300000)[:10]})
"""
SLEEPS = """
import asyncio

LIMIT = 20


async def bad(event):
    if now_and_then():
        if one_of(True, False):
            await asyncio.sleep(LIMIT)
        time.sleep(3)
"""
PURE = """
from proxy.hooks.api import *

API_VERSION = 1
PURE = True


def pre_stop_pod_sandbox(event): return spin(event)
def pre_remove_pod_sandbox(event): return spin(event)


def spin(event):
    if hash(event.pod.sandbox_id) % 16 == 0:
        for _ in range(10**10):
            pass
    return 1 / 0 if hash(event.pod.sandbox_id) % 16 == 1 else None
"""
FILES = {
    "10-good": ("", GOOD, ""),
    "20-hangs": ("", HANGS, EVERYWHERE),
    "30-crashes": ("", CRASHES, EVERYWHERE),
    "40-lies": ("", LIES, EVERYWHERE),
    "50-floods": ("", FLOODS, EVERYWHERE),
    "60-async": (
        "",
        SLEEPS,
        EVERYWHERE.replace("def ", "async def ").replace("return bad", "return await bad"),
    ),
}
POINTS = ("PreRunPodSandbox", "PreCreateContainer", "PreStartContainer", "PreUpdateContainerResources")


@dataclass
class CallDurations:
    """How long calls took, in seconds."""

    took: list[float] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")

    def record(self, method: str, seconds: float) -> None:
        self.took.append(seconds)
        self.slowest = max(self.slowest, (seconds, method))


def write_hooks(node: FaultyNode, share: float) -> None:
    """Write the hooks and the hook configuration of a node."""
    hooks, servers = node.directory / "hooks.d", node.directory / "hookserver.d"
    hooks.mkdir(mode=0o755)
    servers.mkdir(mode=0o755)
    for name, parts in FILES.items():
        (hooks / f"{name}.py").write_text(HEAD_OF_ALL.format(share=share) + "".join(parts))
    registration = {"remote-endpoint": str(node.directory / "hooks.sock"), "failure-policy": "Ignore"}
    (hooks / "70-pure.py").write_text(PURE)
    (servers / "server.json").write_text(json.dumps(registration | {"runtime-hooks": POINTS}))
    config = json.loads((node.directory / "config.yaml").read_text())
    config["hooks"] = {
        "directory": str(hooks),
        "vendorDirectory": str(node.directory / "none"),
        "serverDirectory": str(servers),
        "timeout": f"{TIMEOUT_S * 1000:g}ms",
    }
    (node.directory / "config.yaml").write_text(json.dumps(config))


@contextlib.contextmanager
def bad_server(node: FaultyNode) -> Iterator[list[int]]:
    """Run a hook server that misbehaves, and kill it now and then; gives the number of kills."""
    over, kills = threading.Event(), [0]
    argv = [
        sys.executable,
        str(BENCH / "hook_server.py"),
        "--listen",
        str(node.directory / "hooks.sock"),
        "--bad",
    ]

    def run() -> None:
        while not over.is_set():
            with subprocess.Popen(argv, env=environment(malloc=False), stderr=subprocess.DEVNULL) as popen:
                over.wait(3)
                popen.kill()
            kills[0] += 1
            over.wait(0.3)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield kills
    finally:
        over.set()
        thread.join()


class TimedClient(CriClient):
    """A client that measures the time of its calls."""

    def __init__(self, path: str, calls: CallDurations) -> None:
        super().__init__(path)
        self.times = calls

    def call(self, method: str, request: Any) -> Any:
        begun = time.monotonic()
        try:
            return super().call(method, request)
        finally:
            self.times.record(method, time.monotonic() - begun)


class TimedChurnClient(ChurnClient):
    """A client with its own pods, whose calls are timed."""

    def __init__(self, node: FaultyNode, number: int, share: int, churn: Churn, calls: CallDurations) -> None:
        super().__init__(node, number, share, churn)
        self.calls = calls

    def client(self) -> CriClient:
        return TimedClient(str(self.node.socket), self.calls)


@dataclass
class Chaos:
    """The results."""

    calls: CallDurations
    churn: Churn
    found: CrashResult
    deaths: int = 0
    kills: int = 0
    hooks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def hung(self) -> int:
        return sum(seconds > HUNG_S for seconds in self.calls.took)

    @property
    def wrong(self) -> list[str]:
        return [*self.churn.wrong, *self.found.overlaps]

    @property
    def missed(self) -> bool:
        return bool(self.wrong or self.hung or self.deaths)


def measure(calls: int = CALLS, share: float = 0.05) -> Chaos:
    """Make this many calls with hooks that misbehave in this share of their calls."""
    chaos = Chaos(CallDurations(), Churn(), CrashResult())
    with tempfile.TemporaryDirectory(prefix="hc") as directory, new_node(Path(directory)) as node:
        write_hooks(node, share)
        with bad_server(node) as kills:
            node.start()
            node.wait_until(lambda: _has_hook_changes(node), 20, "the hooks are in use")
            with overlaps_checked(node, chaos.found):
                share_of = round(calls / CLIENTS / CALLS_OF_A_COUNT)
                clients = [
                    TimedChurnClient(node, n, share_of, chaos.churn, chaos.calls) for n in range(CLIENTS)
                ]
                for client in clients:
                    client.start()
                for client in clients:
                    client.join()
                chaos.churn.wrong += [repr(client.error) for client in clients if client.error is not None]
                chaos.deaths = int(not node.alive)
                if node.alive:
                    end_remaining_pods(node)
                    chaos.churn.wrong += node.wait_until_settled(30)
                    chaos.churn.memory.append(memory_mb(node))
            page = node.status() or {}
            internal = page.get("counters", {}).get("internal_errors")
            chaos.churn.wrong += [f"internal errors: {internal}: {page.get('problems')}"] if internal else []
            chaos.churn.wrong += without_hook_changes(node)
        chaos.kills = kills[0]
    return chaos


def _has_hook_changes(node: FaultyNode) -> bool:
    """Return whether a create has the changes of the correct hook."""
    with CriClient(str(node.socket)) as client:
        pod_id = node.pod(client, KINDS[0])
        container_id = node.create(client, pod_id, 0)
        seen = node.runtime.containers[container_id].config.annotations.get("good") == "yes"
        client.end_pod(pod_id)
    with node.runtime._lock:
        node.runtime._calls.clear()
    return bool(seen)


def without_hook_changes(node: FaultyNode) -> list[str]:
    """Report containers that were created without the changes of the correct hook."""
    made = [call.request for call in node.runtime.calls if call.method == "CreateContainer"]
    lacking = [r for r in made if r.config.annotations.get("good") != "yes"]
    return [f"{len(lacking)} of {len(made)} containers were made without the good hook"] if lacking else []


HEAD = (
    "hooks that hang, crash, lie, flood",
    "calls",
    "hung",
    "wrong",
    "deaths",
    "p50",
    "p99",
    "slowest",
    "MB",
)


def rows(chaos: Chaos, share: float) -> list[list[str]]:
    took = sorted(chaos.calls.took)
    return [
        [
            f"{share:.0%} of the calls; server killed {chaos.kills} times",
            str(len(took)),
            str(chaos.hung),
            str(len(chaos.wrong)),
            str(chaos.deaths),
            number(took[len(took) // 2] * 1000, "ms"),
            number(took[len(took) * 99 // 100] * 1000, "ms"),
            f"{number(chaos.calls.slowest[0] * 1000, 'ms')} {chaos.calls.slowest[1]}",
            number(chaos.churn.memory[-1] if chaos.churn.memory else None),
        ]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--share", type=float, default=0.05, help="share of calls in which a hook misbehaves")
    args = parser.parse_args()
    try:
        chaos = measure(args.calls, args.share)
    except BenchError as error:
        progress(str(error))
        return 1
    print(render(HEAD, rows(chaos, args.share)))
    for what in chaos.wrong:
        print(f"  {what}")
    return int(chaos.missed)


if __name__ == "__main__":
    sys.exit(main())
