"""Answers of the commands and of the admin socket, from daemons on an imitated node."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from proxy.admin.client import query_admin
from proxy.backends.cluster.facts_format import ClusterFacts, FactsKind, encode_facts
from proxy.backends.kubelet.checkpoint_writer import static_state
from proxy.cli.main import cli
from proxy.daemon import Daemon
from proxy.demo.client import DemoPod
from proxy.model.errors import RuntimeCallError, TopoproxyError
from proxy.model.idset import CpuSet
from proxy.model.workload import KubeQos
from tests.testkit.daemon import MACHINE, DaemonNode, run, temporary_node
from tests.testkit.waiting import until

GUARANTEED = KubeQos.GUARANTEED
RICH = """
cpuManagerPolicy: static
topologyManagerPolicy: restricted
reconcilePeriod: 200ms
memoryManagerPolicy: Static
reservedMemory: [{numaNode: 0, limits: {memory: 1Gi}}]
kubeReserved: {memory: 1Gi}
evictionHard: {memory.available: 0}
beSuppress: {mode: cpuset, period: 100ms}
admission: {maxCPUsPerPod: 8}
"""
PODS = (
    DemoPod("ls", "LS"),
    DemoPod("be", "BE", KubeQos.BEST_EFFORT),
    DemoPod("system", "SYSTEM"),
    DemoPod("lse", "LSE", cpuset="2-3"),
    DemoPod("lsr", "LSR", cpuset="4-5"),
    DemoPod("guaranteed", kube_qos=GUARANTEED, cpus=2),
    DemoPod("burstable"),
    DemoPod("rival", "LSE", cpuset="2-3"),
    DemoPod("wide", kube_qos=GUARANTEED, cpus=12),
    DemoPod("odd", "LSX"),
)
HOOK = """
from dataclasses import dataclass

from proxy.hooks.api import Adjustment

API_VERSION = 1

@dataclass
class Settings:
    size: int = 1

def pre_create_container(event):
    return Adjustment(annotations={"a": "b"})

def post_start_container(event):
    raise ValueError("as a test wants")
"""


@dataclass
class Answers:
    """Answers with the command or page that gave them."""

    each: list[tuple[str, Any]] = field(default_factory=list)
    routes: set[str] = field(default_factory=set)
    actions: set[str] = field(default_factory=set)

    def command(self, *args: object) -> Any:
        """Run a command with ``--json`` and keep its answer, whatever its exit code."""
        line = [str(word) for word in args]
        done = CliRunner().invoke(cli, [*line, "--json"])
        text = done.stdout
        assert text.startswith(("{", "[")), (line, done.output, done.exception)
        answer = json.loads(text)
        self.each.append((" ".join(["topoproxy", *line]), answer))
        return answer

    def page(self, node: AnsweringNode, route: str, *, act: bool = False, **params: str) -> Any:
        """Query the admin socket and keep the answer."""
        answer = query_admin(node.directory / "admin.sock", route, 30, params, act=act)
        self.each.append((f"{'POST' if act else 'GET'} {route} {params}", answer))
        return answer


class AnsweringNode(DaemonNode):
    """A node with hooks, counters of CPU time and an attached kubelet that has assigned CPUs."""

    def __init__(self, directory: Path, version: int = 1) -> None:
        super().__init__(directory, version=version)
        for name in ("hooks.d", "kubelet", "proc", "cluster"):
            (directory / name).mkdir()
        pods = ClusterFacts(FactsKind.PODS, "n1", 1.0, "7", [])
        (directory / "cluster/pods.json").write_bytes(encode_facts(pods))
        (directory / "proc/stat").write_text("cpu  1 1 1 1 1 1 1 1 0 0\n")
        self.hook("10-example.py", HOOK)
        self.hook("20-broken.py", "import nothing_of_this_name\n")
        held = {"0e": {"main": CpuSet([6])}}
        text = static_state(MACHINE.online, held, reserved=CpuSet([0]))
        (directory / "kubelet/cpu_manager_state").write_text(text)
        endpoint = "unix:///run/topoproxy/cri.sock"
        (directory / "kubelet/config.yaml").write_text(f"containerRuntimeEndpoint: {endpoint}\n")
        journal = directory / "state/attach"
        journal.mkdir(parents=True)
        (journal / "state").write_text("attached\n")
        (journal / "endpoint").write_text(f"{endpoint}\n")
        none = directory / "none"
        self.settings = (
            f"procfsRoot: {directory}/proc\n"
            f"hooks: {{directory: {directory}/hooks.d, vendorDirectory: {none}, serverDirectory: {none}}}\n"
            f"kubelet: {{stateDir: {directory}/kubelet}}\n"
            f"clusterFacts: {{directory: {directory}/cluster}}\n"
        )

    def hook(self, name: str, text: str) -> None:
        path = self.directory / "hooks.d" / name
        path.write_text(text)
        path.chmod(0o644)

    def file(self, text: str) -> Path:
        """Write the configuration of a daemon, for commands."""
        path = self.directory / "config.yaml"
        path.write_text(self.configuration(text))
        path.chmod(0o600)
        return path

    async def try_each(self, pods: Sequence[DemoPod]) -> None:
        for pod in pods:
            try:
                await self.launch(pod)
            except (RuntimeCallError, TopoproxyError):
                continue


def _daemon_answers(answers: Answers, node: AnsweringNode, text: str, *, full: bool = False) -> None:
    """Run a daemon with some pods, and run all queries; ``full``: actions too."""
    config = node.file(text)
    daemon = node.daemon(text, file=config)

    async def scenario() -> None:
        if daemon.parts.hooks is not None:
            await until(lambda: daemon.parts.pages.hooks()["hooks"])
        await node.try_each(PODS)
        if daemon.executor is not None:
            await asyncio.wait_for(daemon.executor.reconciled.wait(), 60)
        await asyncio.to_thread(_query, answers, node, daemon, config)
        if full:
            server: Any = daemon.parts.admin
            answers.routes, answers.actions = set(server._routes), set(server._actions)
            await asyncio.to_thread(_act, answers, node, config)
            await until(lambda: daemon.parts.pages.status()["mode"] == "enforce")

    run(daemon, scenario)


def _query(answers: Answers, node: AnsweringNode, daemon: Daemon, config: Path) -> None:
    at = ("--config", config)
    for route in ("/status", "/hooks", "/release"):
        answers.page(node, route)
    answers.command("status", *at)
    config.write_text(f"{config.read_text()}\ncgroupRoot: {node.directory}/cgroup\n")
    answers.command("status", "--cgroups", *at)
    answers.command("hooks", "list", "--all", *at)
    if daemon.executor is None:
        return
    answers.page(node, "/devices")
    answers.page(node, "/devices/capacity")
    answers.page(node, "/node")
    answers.page(node, "/changes")
    answers.command("devices", *at)
    answers.command("doctor", *at)
    answers.command("upgrade", "--check", *at)
    answers.page(node, "/interface")
    for route in ("/explain", "/memory", "/observe/report"):
        answers.page(node, route)
    answers.page(node, "/explain", query="nothing")
    answers.page(node, "/takeover", view="plan")
    answers.page(node, "/takeover", view="status")
    answers.command("status", "--memory", *at)
    answers.command("observe", "report", *at)
    answers.command("explain", *at)
    for pod in PODS:
        if answers.page(node, "/explain", query=pod.name)["records"]:
            answers.command("explain", pod.name, "--all", *at)


def _act(answers: Answers, node: AnsweringNode, config: Path) -> None:
    at = ("--config", config)
    answers.command("takeover", "plan", *at)
    answers.command("takeover", "finish", *at)
    answers.command("takeover", "start", *at)
    answers.page(node, "/status")
    answers.page(node, "/takeover", view="plan")
    answers.command("takeover", "status", *at)
    answers.command("takeover", "finish", "--with-running", "--force", *at)
    answers.command("takeover", "status", *at)
    answers.page(node, "/takeover/revert", act=True, force="true")
    answers.page(node, "/cluster/refresh", act=True)
    answers.page(node, "/reload", act=True)
    config.write_text(f"{config.read_text()}explainHistory: 7\n")
    answers.command("reload", *at)
    answers.page(node, "/status")
    answers.command("enforce", "status", *at)
    answers.command("enforce", "pause", *at)
    answers.page(node, "/enforce/resume", act=True)
    config.write_text(f"{config.read_text()}nothing: of this name\n")
    answers.page(node, "/reload", act=True)
    answers.page(node, "/status")
    node.file(RICH)
    answers.command("release", *at)
    answers.page(node, "/release")
    answers.page(node, "/status")
    answers.page(node, "/release/start", act=True)
    answers.command("release", "--undo", *at)


def _without_a_daemon(answers: Answers, node: AnsweringNode, text: str) -> None:
    config = node.file(text)
    at = ("--config", config)
    answers.command("release", "--offline", *at)
    answers.command("release", "--offline", "--undo", *at)
    answers.command("hooks", "list", *at)
    answers.command("hooks", "validate", *sorted((node.directory / "hooks.d").iterdir()), *at)
    answers.command(
        "hooks", "run", node.directory / "hooks.d/10-example.py", "--example", "pre_create_container", *at
    )
    answers.command("hooks", "points")
    answers.command("hooks", "points", "configure", "PodFacts")
    answers.command("version")


def _about_machines(answers: Answers, directory: Path) -> None:
    (directory / "m.json").write_text(json.dumps(answers.command("topology")))
    (directory / "static.yaml").write_text(
        "cpuManagerPolicy: static\ntopologyManagerPolicy: single-numa-node\n"
    )
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "job"}}
    limits = {"cpu": 1, "memory": "1Gi"}
    pod["spec"] = {"containers": [{"name": "main", "resources": {"limits": limits}}]}
    (directory / "pod.json").write_text(json.dumps(pod))
    command = ("simulate", directory / "pod.json", "--replicas", 999, "--machine", directory / "m.json")
    answers.command(*command, "--config", directory / "static.yaml", "--explain", "job-1")
    answers.command(*command, "--compare", directory / "static.yaml", "--explain", "job-1")
    (directory / "fleet.yaml").write_text(
        "kind: Fleet\nnodes: [{count: 2, cpus: 16}]\nfill: 1.5\n"
        "pods: [{resources: {limits: {cpu: 3, memory: 1Gi}}}]\n"
    )
    answers.command("simulate", "--cluster", directory / "fleet.yaml", "--verbose")


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """All commands with ``--json`` and all pages of the admin socket that answer JSON, on several nodes."""
    found = Answers()
    with temporary_node(AnsweringNode) as node:
        _daemon_answers(found, node, RICH, full=True)
        _without_a_daemon(found, node, RICH)
    with temporary_node(lambda path: AnsweringNode(path, 2)) as node:
        isolated = "apply: {partitions: isolated}\ntopologyManagerScope: pod\n"
        isolated += f"devicePlugins: {{enabled: true, socketDirectory: {node.directory}/plugins}}\n"
        _daemon_answers(
            found, node, f"cpuManagerPolicy: static\ntopologyManagerPolicy: single-numa-node\n{isolated}"
        )
        _daemon_answers(found, node, "mode: observe\ncpuManagerPolicy: static\n")
        _daemon_answers(found, node, "mode: passthrough\n")
    _about_machines(found, tmp_path_factory.mktemp("machines"))
    return found
