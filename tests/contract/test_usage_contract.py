"""Readings of the kernel's counters: a busy task, groups that are created and removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.backends.cgroup.cpu_usage import CgroupUsage, open_usage
from proxy.engine.be_usage import UsageGroup, rates
from proxy.model.errors import CgroupError

MOUNT = Path("/sys/fs/cgroup")
NAME = f"topoproxy-usage-{os.getpid()}"
PODS = 300


@pytest.fixture
def usage() -> Iterator[CgroupUsage]:
    if os.geteuid() != 0:
        pytest.skip("making cgroups needs root")
    try:
        usage = open_usage(MOUNT)
        (usage.root / NAME).mkdir()
    except (CgroupError, OSError) as error:
        pytest.skip(f"no groups can be made: {error}")
    try:
        yield usage
    finally:
        usage.close()
        for directory in sorted((usage.root / NAME).rglob("*/"), reverse=True):
            directory.rmdir()
        (usage.root / NAME).rmdir()


def test_a_busy_task_is_counted_in_its_group_and_on_the_node(usage: CgroupUsage) -> None:
    (usage.root / NAME / "busy").mkdir()
    (usage.root / NAME / "idle").mkdir()
    query = {name: UsageGroup(f"/{NAME}/{name}") for name in ("busy", "idle", "absent")}
    task = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        (usage.root / NAME / "busy/cgroup.procs").write_text(str(task.pid))
        before, used = usage.read(query), 0.0
        for _ in range(300):
            time.sleep(0.1)
            after = usage.read(query)
            if (found := rates(before, after, os.cpu_count() or 1)) and found.groups["busy"] > 0.05:
                used = found.node
                break
    finally:
        task.send_signal(signal.SIGKILL)
        task.wait()
    assert used > 0
    assert found is not None
    assert found.groups["idle"] == 0
    assert "absent" not in found.groups


def test_a_group_that_is_created_again_is_counted_anew(usage: CgroupUsage) -> None:
    directory, query = usage.root / NAME / "pod", {"p": UsageGroup(f"/{NAME}/pod")}
    directory.mkdir()
    assert usage.read(query).groups == {"p": {f"{NAME}/pod": 0}}
    directory.rmdir()
    assert usage.read(query).groups == {}
    directory.mkdir()
    assert usage.read(query).groups == {"p": {f"{NAME}/pod": 0}}
    directory.rmdir()
    directory.mkdir()  # between two readings: the open file belongs to the removed group
    assert usage.read(query).groups == {"p": {f"{NAME}/pod": 0}}


def test_many_pods_cost_little(usage: CgroupUsage) -> None:
    query = {}
    for number in range(PODS):
        (usage.root / NAME / f"pod{number}").mkdir()
        query[f"p{number}"] = UsageGroup(f"/{NAME}/pod{number}")
    usage.read(query)
    spent = []
    for _ in range(5):
        began = time.thread_time()
        assert len(usage.read(query).groups) == PODS
        spent.append(time.thread_time() - began)
    assert min(spent) < 0.01, f"{min(spent) * 1000:.1f} ms of CPU for {PODS} pods"
