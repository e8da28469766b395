"""Effects of hooks on clients, containers and the kernel, on a real containerd.

The tests print durations (``pytest -s``).
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from container_process import environment, inside
from cri import Cri, RpcError, cgroup_of, code, cpuset_of, is_v2, online
from daemon import CPUSET_ANNOTATION, QOS_LABEL, DaemonProcess
from grpc import StatusCode
from hook_server import SEEN
from hooked_node import HookedNode, labels_of
from private_runtime import CGROUPS, PrivateRuntime, end_process, wait_for

from proxy.model.idset import CpuSet

pytestmark = pytest.mark.e2e

ALL = online()
LAST = CpuSet([max(ALL)])
REST = ALL - LAST
CPU = next((CGROUPS / name for name in ("cpu", "cpu,cpuacct") if (CGROUPS / name).is_dir()), CGROUPS)
LIMITED: dict[str, Any] = {"cpu_period": 100_000, "cpu_quota": 100_000, "cpu_shares": 1024}
QUOTA, NO_QUOTA = ("cpu.max", "max") if is_v2() else ("cpu.cfs_quota_us", "-1")
SHIPPED = ("20-quota-off", "30-cpus-file", "40-irq-affinity", "50-crio-annotations", "90-differ")
NARROW_HOOK = """
    def pre_create_container(event):
        if event.pod.name == "narrow":
            return api.Adjustment(cpus=api.CpuSet.parse("{cpus}"))
"""


@pytest.fixture
def start_node(
    runtime: PrivateRuntime, tmp_path: Path, start_daemon: Callable[..., DaemonProcess]
) -> Iterator[Callable[..., HookedNode]]:
    """Start nodes with empty hook directories; keyword arguments go into the section ``hooks``."""
    clients: list[Cri] = []

    def make(config: dict[str, object] | None = None, **hooks: object) -> HookedNode:
        for name in ("hooks.d", "hookserver.d"):
            (tmp_path / name).mkdir()
        section = {
            "directory": str(tmp_path / "hooks.d"),
            "vendorDirectory": str(tmp_path / "none"),
            "serverDirectory": str(tmp_path / "hookserver.d"),
            "timeout": "5s",
            **hooks,
        }
        daemon = start_daemon(hooks=section, **(config or {}))
        clients.append(daemon.client())
        return HookedNode(daemon, clients[-1], tmp_path)

    yield make
    for client in clients:
        client.close()
    runtime.clear()


def pod(node: HookedNode, name: str, qos: str = "LS", **annotations: str) -> str:
    """Run a sandbox; one of class LSE owns the last CPU."""
    own = {CPUSET_ANNOTATION: json.dumps({"cpuset": str(LAST)})} if qos == "LSE" else {}
    return node.cri.run_pod(name, labels={QOS_LABEL: qos}, annotations={**own, **annotations})


def remove(node: HookedNode, container: str) -> None:
    node.cri.stop(container)
    node.cri.remove(container)


def knob(container: str, name: str, root: Path = CPU) -> str:
    """Return the first word of a file in a container's cgroup."""
    group = cgroup_of(container, root)
    assert group is not None
    return (group / name).read_text().split()[0]


def shares(milli: int) -> tuple[str, str]:
    """Return the name of the CPU weight file, and its content for a value of cpu.shares."""
    return ("cpu.weight", str(1 + (milli - 2) * 9999 // 262142)) if is_v2() else ("cpu.shares", str(milli))


def annotations_of(node: HookedNode, container: str) -> dict[str, str]:
    return dict(node.cri.status(container).status.annotations)


# -- shipped hooks -----------------------------------------------------------------------------------------


def test_all_shipped_hooks_are_enabled_and_disabled_while_the_daemon_runs(
    start_node: Callable[..., HookedNode], tmp_path: Path
) -> None:
    irq = tmp_path / "proc/irq/9/smp_affinity_list"  # a copy: the test must not change the host's interrupts
    irq.parent.mkdir(parents=True)
    irq.write_text(f"{ALL}\n")
    (tmp_path / "proc/irq/default_smp_affinity").write_text(f"{ALL.bits:x}\n")
    irqs: dict[str, object] = {"proc": str(tmp_path / "proc")}
    power: dict[str, object] = {name: str(tmp_path / name) for name in ("sysfs", "power_state")}
    keys: dict[str, dict[str, object]] = {
        "20-quota-off": {"annotation": "example.com/quota=off"},
        "30-cpus-file": {"root": str(tmp_path / "cpus"), "which": "all"},
        "40-irq-affinity": irqs | {"state": str(tmp_path / "irqs.json")},
        "50-crio-annotations": irqs | power | {"irq_state": str(tmp_path / "irqs.json")},
    }
    settings = {name: {"config": config} for name, config in keys.items()}
    node = start_node({"koordinator": {"keepCFSQuota": "always"}}, settings=settings)
    assert node.hooks() == {}, "no hook is enabled"
    for name in SHIPPED:
        node.command("enable", name)
    for name in SHIPPED:
        node.wait_until_in_use(name)

    sharer = node.cri.run(pod(node, "web"))
    requests = {"example.com/quota": "off", "cpu-load-balancing.crio.io": "disable"}
    owner = node.cri.run(pod(node, "db", "LSE", **requests), **LIMITED)
    assert environment(owner)["EXCLUSIVE_CPUS"] == str(LAST)
    cpus_file = inside(owner, "/run/topoproxy/cpus")
    assert f"EXCLUSIVE_CPUS={LAST}\n" in cpus_file.read_text()
    with pytest.raises(OSError, match="Read-only file system"):
        cpus_file.write_text("lies")
    rest = inside(sharer, "/run/topoproxy/cpus")
    wait_for("the sharer's file to follow", lambda: f"SHARED_CPUS={REST}\n" in rest.read_text())
    assert knob(owner, QUOTA) == NO_QUOTA
    node.cri.update(owner, **LIMITED)
    assert knob(owner, QUOTA) == NO_QUOTA, "an update does not restore the quota"
    wait_for("interrupts to leave", lambda: irq.read_text().strip() == str(REST))
    if not is_v2():
        balance = "cpuset.sched_load_balance"
        wait_for("load balancing to be disabled", lambda: knob(owner, balance, CGROUPS / "cpuset") == "0")
    changed = [line for line in node.daemon.log.read_text().splitlines() if "hooks changed a request" in line]
    assert any("20-quota-off: cpu_quota 100000 -> -1; 30-cpus-file: envs[EXCL" in line for line in changed)
    assert all(hook["last_error"] == "" for hook in node.hooks().values())

    remove(node, owner)
    wait_for("interrupts to come back", lambda: irq.read_text().strip() == str(ALL))
    wait_for("the file to follow back", lambda: f"SHARED_CPUS={ALL}\n" in rest.read_text())
    for name in SHIPPED:
        node.command("disable", name)
    wait_for("all hooks to be gone", lambda: not node.hooks())
    plain = node.cri.run(pod(node, "plain", "LSE"), **LIMITED)
    assert (knob(plain, QUOTA), environment(plain).get("EXCLUSIVE_CPUS")) == ("100000", None)


# -- files that come and go --------------------------------------------------------------------------------


class ContainerLoad:
    """Clients that create and remove containers; a label names the version of the hook that ran."""

    def __init__(self, node: HookedNode, clients: int = 3) -> None:
        self.node = node
        self.faults: list[str] = []
        self.seen: list[list[str]] = [[] for _ in range(clients)]
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(clients)]

    def _run(self, index: int) -> None:
        with self.node.daemon.client() as cri:
            cri.adopt(self.node.cri)
            group = cri.run_pod(f"load-{index}")
            while not self._ends.is_set():
                try:
                    container = cri.create(group)
                    self.seen[index].append(labels_of(cri, container).get("version", ""))
                    cri.remove(container)
                except RpcError as error:
                    self.faults.append(str(error))
                    return

    def __enter__(self) -> ContainerLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(60)

    def reaches(self, version: str) -> None:
        """Wait until a container of each client has the label of a version."""
        began = time.monotonic()
        wait_for(f"version {version!r}", lambda: all(s and s[-1] == version for s in self.seen))
        print(f"version {version!r} in effect for all after {time.monotonic() - began:.2f} s")


def test_a_hook_is_added_changed_broken_and_removed_under_load(start_node: Callable[..., HookedNode]) -> None:
    node = start_node()

    def put(version: str) -> None:
        text = f"""
            def pre_create_container(event):
                return api.Adjustment(labels={{"version": "{version}"}})
        """
        node.put_hook("50-version", text, wait=False)

    with ContainerLoad(node) as load:
        load.reaches("")
        for version in ("1", "2", "3"):
            put(version)
            load.reaches(version)
        (node.directory / "50-version.py").write_text("API_VERSION = 1\ndef (")
        wait_for("the broken file", lambda: node.hook("50-version")["state"] == "old version running")
        count = sum(map(len, load.seen))
        wait_for("more creates", lambda: sum(map(len, load.seen)) > count + 10)
        load.reaches("3")
        put("4")
        load.reaches("4")
        (node.directory / "50-version.py").unlink()
        load.reaches("")
    assert load.faults == []
    for seen in load.seen:
        changes = [one for one, before in zip(seen, [None, *seen], strict=False) if one != before]
        assert changes == ["", "1", "2", "3", "4", ""], "each version took effect exactly once"
    print(f"{sum(map(len, load.seen))} containers")


# -- vetoes and CPUs ---------------------------------------------------------------------------------------


def test_a_veto_reaches_the_client_and_moves_no_container(start_node: Callable[..., HookedNode]) -> None:
    node = start_node()
    node.put_hook(
        "10-gate",
        """
        def pre_run_pod_sandbox(event):
            return api.Veto("no pods of that name") if event.pod.name == "never" else None

        def validate_create_container(event):
            return api.Veto("not this one") if event.event.container.name == "bad" else None

        def pre_start_container(event):
            return api.Veto("not today") if event.container.name == "late" else None
        """,
    )
    with pytest.raises(RpcError) as refused:
        pod(node, "never")
    assert code(refused.value) is StatusCode.FAILED_PRECONDITION
    assert "default/never" in str(refused.value)
    assert "hook 10-gate: no pods of that name" in str(refused.value)
    sharer = node.cri.run(pod(node, "web"))
    owner = pod(node, "db", "LSE")
    with pytest.raises(RpcError, match=r"default/db/bad.*hook 10-gate: not this one"):
        node.cri.create(owner, "bad", **LIMITED)
    assert cpuset_of(sharer).cpus == ALL, "no container was moved"
    late = node.cri.create(owner, "late", **LIMITED)
    with pytest.raises(RpcError, match="hook 10-gate: not today"):
        node.cri.start(late)
    node.cri.remove(late)
    assert cpuset_of(node.cri.run(owner, **LIMITED)).cpus == LAST
    assert cpuset_of(sharer).cpus == REST


def test_cpus_that_a_hook_narrows_follow_the_pool_and_survive_crashes(
    start_node: Callable[..., HookedNode],
) -> None:
    node = start_node()
    node.put_hook("10-narrow", NARROW_HOOK.format(cpus=LAST))
    narrow, free = node.cri.run(pod(node, "narrow")), node.cri.run(pod(node, "free"))
    where = cpuset_of(narrow)
    assert (where.cpus, where.effective, where.tasks) == (LAST, LAST, frozenset({LAST}))
    assert cpuset_of(free).cpus == ALL
    explanation = node.daemon.explain("default/narrow").stdout
    assert f"Narrowed to CPUs {LAST} by hook 10-narrow" in explanation, explanation

    owner = node.cri.run(pod(node, "db", "LSE"), **LIMITED)
    assert cpuset_of(narrow).cpus == cpuset_of(free).cpus == REST, "a narrowed container leaves owned CPUs"
    wait_for("the problem to be reported", lambda: f"nothing is left of CPUs {LAST}" in node.problems())
    remove(node, owner)
    wait_for("the CPUs to come back", lambda: cpuset_of(narrow).cpus == LAST)

    node.daemon.kill9()
    node.daemon.start()
    (node.directory / "10-narrow.py").unlink()
    node.daemon.restart()
    node.daemon.wait_for_reconciles()
    assert (cpuset_of(narrow).cpus, cpuset_of(free).cpus) == (LAST, ALL), "it stays narrowed"
    explanation = node.daemon.explain("default/narrow").stdout
    assert f"Narrowed to CPUs {LAST} by hook 10-narrow" in explanation, explanation
    assert node.daemon.status()["violations"] == []


def test_a_daemon_killed_during_a_hook_recovers(start_node: Callable[..., HookedNode]) -> None:
    """A kill before or after the create reaches the runtime leaves a correct state."""
    node = start_node()
    node.put_hook(
        "10-slow",
        """
        import time

        def pre_create_container(event):
            if event.container.name != "later":
                time.sleep(2)
            return api.Adjustment(cpus=api.CpuSet.parse("REST"))

        def post_create_container(event):
            time.sleep(2)
        """.replace("REST", str(REST)),
    )
    group = pod(node, "web")
    for name, there in (("never", 0), ("later", 1)):
        call = threading.Thread(target=_ignored, args=(node.cri, group, name))
        call.start()
        wait_for("the hook to run", lambda: node.hook("10-slow").get("running"))
        node.daemon.kill9()
        call.join(60)
        node.daemon.start()
        assert len(node.cri.list()) == there, name
    (made,) = node.cri.list()
    node.cri.start(made.id)
    node.daemon.wait_for_reconciles()
    assert cpuset_of(made.id).cpus == REST
    assert node.daemon.status()["violations"] == []


def _ignored(cri: Cri, group: str, name: str) -> None:
    try:
        cri.create(group, name, timeout=20)
    except RpcError as error:
        assert code(error) in (StatusCode.UNAVAILABLE, StatusCode.CANCELLED), error  # noqa: PT017


@pytest.mark.parametrize("may", [True, False])
def test_a_hook_may_use_owned_cpus_only_if_configured(
    start_node: Callable[..., HookedNode], may: bool
) -> None:
    node = start_node(ownedCPUs=may)
    node.put_hook("10-narrow", NARROW_HOOK.format(cpus=LAST))
    own = pod(node, "db", "LSE")
    owner = node.cri.run(own, **LIMITED)
    guest = node.cri.run(pod(node, "narrow"))
    if not may:
        assert cpuset_of(guest).cpus == REST, "the hook's response is ignored"
        assert "10-narrow" in node.problems()
        assert f"a hook may choose from {REST}" in node.hook("10-narrow")["last_error"]
        return
    assert cpuset_of(guest).cpus == LAST == cpuset_of(owner).cpus
    explanation = node.daemon.explain("default/narrow").stdout
    assert "by hook 10-narrow" in explanation, explanation
    remove(node, owner)
    again = node.cri.run(own, attempt=1, **LIMITED)
    assert cpuset_of(again).cpus == LAST, "the owner starts on its CPUs"
    node.daemon.kill9()
    node.daemon.start()
    node.daemon.wait_for_reconciles()
    assert cpuset_of(guest).cpus == LAST == cpuset_of(again).cpus
    assert node.daemon.status()["violations"] == []


def test_a_hook_gives_owned_cpus_to_a_be_pod_with_an_erased_cpuset(
    start_node: Callable[..., HookedNode],
) -> None:
    node = start_node({"koordinator": {"beCpuset": "erase"}}, ownedCPUs=True)
    node.put_hook("10-narrow", NARROW_HOOK.format(cpus=LAST))
    owner = node.cri.run(pod(node, "db", "LSE"), **LIMITED)
    found = []
    for name in ("plain", "narrow"):
        group = node.cri.run_pod(
            name, labels={QOS_LABEL: "BE"}, cgroup_parent=f"/kubepods/besteffort/pod{name}"
        )
        found.append(cpuset_of(node.cri.run(group)).effective)
    assert found == [REST, LAST]
    assert cpuset_of(owner).cpus == LAST
    node.daemon.wait_for_reconciles()
    assert node.problems() == "[]"


# -- sandboxes and others ----------------------------------------------------------------------------------


def test_a_pod_runs_in_the_cgroup_that_a_hook_has_chosen(
    start_node: Callable[..., HookedNode], runtime: PrivateRuntime
) -> None:
    node = start_node()
    elsewhere = f"{runtime.cgroup}/elsewhere/pod-moved"
    node.put_hook(
        "10-elsewhere",
        f"""
        def pre_run_pod_sandbox(event):
            return api.Adjustment(cgroup_parent="{elsewhere}") if event.pod.name == "moved" else None
        """,
    )
    group = pod(node, "moved", "LSE")
    owner, sharer = node.cri.run(group, **LIMITED), node.cri.run(pod(node, "web"))
    for one in (group, owner):
        where = cgroup_of(one)
        assert where is not None
        assert str(where.parent).endswith(elsewhere), where
    assert (cpuset_of(owner).cpus, cpuset_of(sharer).cpus) == (LAST, REST)
    node.daemon.kill9()
    node.daemon.start()
    again = node.cri.run(group, "second", **LIMITED)
    where = cgroup_of(again)
    assert where is not None
    assert str(where.parent).endswith(elsewhere), "the cgroup is the same after a crash"
    assert cpuset_of(again).cpus == LAST
    remove(node, again)
    remove(node, owner)
    wait_for("CPUs to come back", lambda: cpuset_of(sharer).cpus == ALL)


def test_updates_of_other_containers_by_a_hook_reach_the_kernel(
    start_node: Callable[..., HookedNode],
) -> None:
    node = start_node()
    node.put_hook(
        "10-others",
        f"""
        known = {{}}

        def synchronize(event):
            known.update((each.pod.name, each.container.id) for each in event.containers)

        def post_create_container(event):
            known[event.pod.name] = event.container.id

        def pre_stop_container(event):
            return api.Adjustment(updates={{known["web"]: api.Update(cpu_shares=512)}})

        def post_start_container(event):
            if event.pod.name == "trigger":
                return api.Adjustment(
                    updates={{
                        known["web"]: api.Update(cpu_shares=256, cpus=api.CpuSet.parse("{LAST}")),
                        "missing": api.Update(cpu_shares=2),
                    }}
                )
        """,
    )
    other = node.cri.run(pod(node, "web"), **LIMITED)
    trigger = node.cri.run(pod(node, "trigger"), **LIMITED)
    file, value = shares(256)
    wait_for("the shares to change", lambda: knob(other, file) == value)
    wait_for("the CPUs to change", lambda: cpuset_of(other).cpus == LAST)
    assert knob(trigger, file) == shares(1024)[1]
    wait_for(
        "the missing container to be reported",
        lambda: "containerID=missing hook=10-others" in node.problems(),
    )
    remove(node, trigger)
    wait_for("the shares to change", lambda: knob(other, file) == shares(512)[1])
    assert cpuset_of(other).cpus == LAST, "the daemon's update carries the CPUs"
    node.daemon.kill9()
    node.daemon.start()
    node.daemon.wait_for_reconciles()
    assert (knob(other, file), cpuset_of(other).cpus) == (shares(512)[1], LAST)


# -- servers -----------------------------------------------------------------------------------------------


@pytest.fixture
def start_hook_server(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Return a function that starts a hook server on ``hook.sock``."""
    started: list[subprocess.Popen[str]] = []
    socket = tmp_path / "hook.sock"

    def start() -> subprocess.Popen[str]:
        socket.unlink(missing_ok=True)
        program = Path(__file__).with_name("hook_server.py")
        started.append(subprocess.Popen([sys.executable, program, socket], text=True))
        wait_for("the server", socket.exists)
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
        end_process(process)


@pytest.mark.parametrize("policy", ["Ignore", "Fail"])
def test_a_hook_server_is_used_again_after_a_kill_and_after_a_hang(
    start_node: Callable[..., HookedNode],
    start_hook_server: Callable[[], subprocess.Popen[str]],
    tmp_path: Path,
    policy: str,
) -> None:
    process = start_hook_server()
    node = start_node(timeout="500ms")
    node.register_server("koordlet", tmp_path / "hook.sock", policy, "PreCreateContainer")
    group = pod(node, "web")

    def seen() -> bool:
        container = node.cri.create(group)
        found = annotations_of(node, container).get(SEEN) == "server"
        node.cri.remove(container)
        return found

    def check_without_server(when: str) -> None:
        for _ in range(4):  # at the fourth create the breaker is open
            if policy == "Ignore":
                assert not seen(), when
            else:
                with pytest.raises(RpcError, match="container default/web/main: hook koordlet"):
                    node.cri.create(group)
        assert node.hook("koordlet")["breaker_open"], when
        assert node.hook("koordlet")["last_error"], when

    wait_for("the server to be called", seen)
    process.kill()
    process.wait(10)
    check_without_server("killed")
    process = start_hook_server()
    wait_for("the server to be called again", seen)
    os.kill(process.pid, signal.SIGSTOP)
    wait_for("all threads of the server to stop", lambda: states(process.pid) == {"T"})
    began = time.monotonic()
    check_without_server("hangs")
    print(f"{policy}: 4 creates in {time.monotonic() - began:.2f} s while the server hangs")
    os.kill(process.pid, signal.SIGCONT)
    wait_for("the server to be called again", seen)
    node.cri.start(node.cri.create(group))


def test_the_child_of_a_forking_hook_does_not_block_the_next_daemon(
    start_node: Callable[..., HookedNode],
) -> None:
    """Children of ``os.fork`` must not keep the lock and the connections of a killed daemon."""
    node = start_node()
    node.put_hook(
        "10-forks",
        """
        import os, sys, time

        def pre_create_container(event):
            if not os.fork():
                while event.container.name == "stays":
                    time.sleep(0.1)
            sys.stderr.close()
            return api.Adjustment(labels={"version": "1"})
        """,
    )
    group = pod(node, "web")
    for name in ("returns", "stays", "returns-too"):
        assert labels_of(node.cri, node.cri.create(group, name))["version"] == "1"
    left = children(node)
    try:
        wait_for("the other children to end", lambda: len(children(node)) == 1)
        left = children(node)
        node.cri.run(pod(node, "db", "LSE"), **LIMITED)
        wait_for(
            "the daemon to log the placement",
            lambda: "placed pod=default/db container=main" in node.daemon.log.read_text(),
        )
        node.daemon.kill9()
        node.daemon.start()
        assert Path(f"/proc/{left[0]}").exists(), "the child of the killed daemon still runs"
    finally:
        for one in left:
            os.kill(one, signal.SIGKILL)


def children(node: HookedNode) -> list[int]:
    """Return the pids of the daemon's child processes that have not ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # the process has ended
            continue
        if int(parent) == node.daemon.pid and state != "Z":
            found.append(int(entry.parent.name))
    return found


def states(pid: int) -> set[str]:
    """Return the states of a process's threads."""
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    return {stat.read_text().rpartition(")")[2].split()[0] for stat in stats}


# -- hooks that hang ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["time.sleep(60)", "while True: pass"])
def test_a_hanging_hook_delays_only_its_own_call(start_node: Callable[..., HookedNode], how: str) -> None:
    node = start_node(timeout="4s")
    node.put_hook(
        "10-hangs",
        f"""
        import time

        def pre_create_container(event):
            if event.container.name == "victim":
                {how}
        """,
    )
    group = pod(node, "web")
    before = life_cycles(node, group, 10)
    done: list[float] = []

    def victim() -> None:
        with node.daemon.client() as cri:
            cri.adopt(node.cri)
            began = time.monotonic()
            cri.create(group, "victim")
            done.append(time.monotonic() - began)

    thread = threading.Thread(target=victim)
    thread.start()
    wait_for("the hook to hang", lambda: node.hook("10-hangs")["running"])
    during = life_cycles(node, group, 20, meanwhile=lambda: not done)
    thread.join(60)
    for what, times in (("before", before), ("during", during)):
        print(
            f"{how}: {len(times)} life cycles {what}: median {statistics.median(times) * 1000:.0f} ms, "
            f"longest {max(times) * 1000:.0f} ms"
        )
    assert done[0] > 3.9, "the create waits for the timeout of the hook"
    assert during, "other calls are served meanwhile"
    assert max(during) < max(3.0, 10 * max(before)), "no other call waits for the hook"


def life_cycles(
    node: HookedNode, group: str, count: int, meanwhile: Callable[[], bool] = lambda: True
) -> list[float]:
    """Create, start, stop and remove containers while the condition holds; returns the durations."""
    times = []
    for attempt in range(count):
        began = time.monotonic()
        container = node.cri.run(group, "other", attempt=attempt)
        node.cri.stop(container)
        node.cri.remove(container)
        if not meanwhile():
            break
        times.append(time.monotonic() - began)
    return times
