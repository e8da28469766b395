"""Schedulers as programs: those of other projects that read our objects, as their documents advise.

See the guide of Volcano v1.10.0 to numaaware (how_to_use_numa_aware.md), scheduler-plugins v0.34.7
pkg/noderesourcetopology/README.md, and the proposal on CPU orchestration of Koordinator v1.8.0
(20220530-fine-grained-cpu-orchestration.md).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from proxy.demo.client import QOS_LABEL
from tests.cluster.api_client import Json
from tests.cluster.control_plane import ControlPlane, control_plane_skip_reason, free_port
from tests.scheduler.objects import pod

KUBE_ARGUMENTS = ("--config={config}", "--bind-address=127.0.0.1", "--secure-port={port}")
CLUSTER, READERS = "TOPOPROXY_CLUSTER", "TOPOPROXY_READERS"
POLICY = {"volcano.sh/numa-topology-policy": "single-numa-node"}
GROUP = "scheduling.k8s.io/group-name"
PRIORITY_CLASS = {
    "apiVersion": "scheduling.k8s.io/v1",
    "kind": "PriorityClass",
    "metadata": {"name": "koord-prod"},
    "value": 9500,
}


def reader_skip_reason(program: str) -> str:
    """Return why a reader cannot be run here; empty if it can."""
    if reason := control_plane_skip_reason():
        return reason
    if not os.environ.get(READERS):
        return f"needs {program}, which make test-readers builds ({READERS}: its directory)"
    directory = Path(os.environ[READERS])
    if (directory / program).exists():
        return ""
    log = directory / f"{program}.log"
    lines = log.read_text().splitlines() if log.exists() else []
    return f"there is no {program} in {directory}" + (f": {lines[-1]}" if lines else "")


class SchedulerProgram:
    """A scheduler that runs while ``running`` is open."""

    def __init__(
        self, plane: ControlPlane, program: str, config: Json, *arguments: str, directory: str = READERS
    ) -> None:
        """Prepare to start it.

        Args:
            plane: Its API server.
            program: Its file name.
            config: Its configuration file.
            arguments: More arguments; ``{config}``, ``{kubeconfig}`` and ``{port}`` are replaced.
            directory: The environment variable that names the directory of the program.
        """
        self.log = plane.directory / f"{program}.log"
        file = plane.directory / f"{program}.yaml"
        file.write_text(yaml.safe_dump(config))
        found = {"config": str(file), "kubeconfig": str(plane.kubeconfig()), "port": str(free_port())}
        self._command = [f"{os.environ[directory]}/{program}"]
        self._command += [each.format(**found) for each in arguments]

    @contextlib.contextmanager
    def running(self) -> Iterator[int]:
        """Run it; yields its process id."""
        with self.log.open("ab") as output:
            process = subprocess.Popen(self._command, stdout=output, stderr=output, cwd=self.log.parent)
        try:
            yield process.pid
            assert process.poll() is None, self.log.read_text()[-3000:]
        finally:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class ReaderScheduler:
    """A scheduler of another project, and what its pods carry.

    Attributes:
        name: ``spec.schedulerName`` of its pods.
        program: What runs.
        fields: Labels, annotations and fields of a pod that requests CPUs on one NUMA node.
        groups: Whether each pod is in a PodGroup of its own, as Volcano's controller makes one.
    """

    name: str
    program: SchedulerProgram
    fields: Json = field(default_factory=dict)
    groups: bool = False

    def pod(self, plane: ControlPlane, namespace: str, name: str, cpus: int) -> Json:
        """Return a pod, and create the objects that it needs."""
        fields: Json = {
            key: dict(each) if isinstance(each, dict) else each for key, each in self.fields.items()
        }
        if self.groups:
            group_pod(plane, namespace, name)
            fields.setdefault("annotations", {})[GROUP] = name
        return pod(name, cpus, schedulerName=self.name, **fields)


def group_pod(plane: ControlPlane, namespace: str, name: str) -> None:
    """Create the PodGroup of one pod, in place of an earlier one."""
    groups = pod_groups(namespace)
    if plane.get(f"{groups}/{name}"):
        plane.delete(f"{groups}/{name}")
    spec = {"minMember": 1, "queue": "default"}
    value = {"apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "PodGroup", "metadata": {"name": name}}
    plane.create(groups, {**value, "spec": spec})


def pod_groups(namespace: str) -> str:
    return f"/apis/scheduling.volcano.sh/v1beta1/namespaces/{namespace}/podgroups"


def kube_scheduler_config(plane: ControlPlane, name: str, profile: Json, client: Json | None = None) -> Json:
    """Return the configuration of kube-scheduler, or of a scheduler that is made from it.

    Args:
        plane: The API server.
        name: ``spec.schedulerName`` of its pods.
        profile: More of its profile.
        client: Limits of its requests.
    """
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(plane.kubeconfig()), **(client or {})},
        "leaderElection": {"leaderElect": False},
        "profiles": [{"schedulerName": name, **profile}],
    }


def topology_match(
    plane: ControlPlane, *arguments: str, resync_s: int, client: Json | None = None
) -> ReaderScheduler:
    """scheduler-plugins' NodeResourceTopologyMatch.

    Args:
        plane: The API server.
        arguments: More arguments.
        resync_s: How often its cache is compared with the objects; 0 for no cache.
        client: Limits of its requests.
    """
    settings: Json = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "NodeResourceTopologyMatchArgs",
        "scoringStrategy": {"type": "LeastAllocated"},
    }
    plugins: Json = {"multiPoint": {"enabled": [{"name": "NodeResourceTopologyMatch"}]}}
    if resync_s:
        settings["cacheResyncPeriodSeconds"] = resync_s
        settings["cache"] = {
            "foreignPodsDetect": "OnlyExclusiveResources",
            "resyncMethod": "Autodetect",
            "informerMode": "Dedicated",
        }
    else:
        plugins["reserve"] = {"disabled": [{"name": "NodeResourceTopologyMatch"}]}
    profile = {
        "plugins": plugins,
        "pluginConfig": [{"name": "NodeResourceTopologyMatch", "args": settings}],
    }
    config = kube_scheduler_config(plane, "nrt", profile, client)
    return ReaderScheduler(
        "nrt", SchedulerProgram(plane, "nrt-scheduler", config, *KUBE_ARGUMENTS, *arguments)
    )


def volcano(plane: ControlPlane, *arguments: str) -> ReaderScheduler:
    """Volcano's scheduler with the plugin numa-aware."""
    numa = {"name": "numa-aware", "arguments": {"weight": 10}}
    first, second = (
        ("priority", "gang", "conformance"),
        ("drf", "predicates", "proportion", "nodeorder", "binpack"),
    )
    tiers = [
        {"plugins": [{"name": name} for name in first]},
        {"plugins": [*({"name": name} for name in second), numa]},
    ]
    program = SchedulerProgram(
        plane, "volcano-scheduler", {"actions": "enqueue, allocate, backfill", "tiers": tiers},
        "--kubeconfig={kubeconfig}", "--scheduler-conf={config}", "--leader-elect=false",
        "--cache-dumper=false", "--logtostderr", *arguments,
    )  # fmt: skip
    return ReaderScheduler("volcano", program, {"annotations": POLICY}, groups=True)


def koordinator(plane: ControlPlane, *arguments: str, client: Json | None = None) -> ReaderScheduler:
    """Koordinator's scheduler with NodeNUMAResource; it chooses the CPUs of its pods."""
    plugins = [{"name": "NodeNUMAResource"}, {"name": "DefaultPreBind"}]
    profile = {"plugins": {"multiPoint": {"enabled": plugins}}}
    config = kube_scheduler_config(plane, "koord-scheduler", profile, client)
    more = ("--port=0", "--authentication-skip-lookup=true")
    program = SchedulerProgram(plane, "koord-scheduler", config, *KUBE_ARGUMENTS, *more, *arguments)
    plane.apply(PRIORITY_CLASS)
    fields = {
        "labels": {QOS_LABEL: "LSR"},
        "annotations": {"scheduling.koordinator.sh/resource-spec": '{"preferredCPUBindPolicy":"FullPCPUs"}'},
        "priorityClassName": "koord-prod",
    }
    return ReaderScheduler("koord-scheduler", program, fields)
