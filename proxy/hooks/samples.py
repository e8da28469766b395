"""Sample facts and one full event of each point: for examples in documents and for tests of hooks.

A database that owns four CPUs of node 0 runs alongside two pods that share, on a machine of two nodes with
eight CPUs each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

from proxy.hooks.answers import Adjustment
from proxy.hooks.events import (
    POINTS,
    Configure,
    MachineChanged,
    Point,
    PoolsChanged,
    PreStopContainer,
    PreUpdateContainerResources,
    Shutdown,
    Synchronize,
)
from proxy.hooks.facts import ContainerFacts, Decision, Device, Mount, PodFacts, Pools, Resources, Running
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from proxy.topology.description import machine_from_json

_GIB: Final = 1 << 30
_SANDBOX: Final = "5f0d" * 16
_ID: Final = "c0a1" * 16


def _small(cpus: int) -> dict[str, Any]:
    rows = [[cpu, cpu - cpu % 2, 0 if cpu < 8 else 8, cpu // 8] for cpu in range(cpus)]
    nodes = [
        {
            "id": node,
            "cpus": f"{8 * node}-{min(8 * node + 7, cpus - 1)}",
            "mem_bytes": 64 * _GIB,
            "distance": [10, 20] if node == 0 else [20, 10],
        }
        for node in (0, 1)
    ]
    columns = ["cpu", "core", "package", "numa"]
    reported = {"cpus": {"offline": f"{cpus}-15"}} if cpus < 16 else {}
    return {"cpu_columns": columns, "cpu_rows": rows, "numa": {"nodes": nodes}} | reported


MACHINES: Final = {"machine": _small(16), "before": _small(16), "after": _small(12)}
"""The machines of the samples as short JSON, by the fields of events that contain them: two packages with one
NUMA node each, which has four cores of two threads; and the same machine without four of its CPUs."""

POD: Final = PodFacts(
    sandbox_id=_SANDBOX,
    uid="0f9a3c52-6f0f-4c43-9d0e-3f6d5a1c7e11",
    namespace="shop",
    name="db-0",
    qos="LSR",
    kube_qos="Guaranteed",
    cgroup_parent="/kubepods/pod0f9a3c52-6f0f-4c43-9d0e-3f6d5a1c7e11",
    labels={"app": "db", "koordinator.sh/qosClass": "LSR"},
    annotations={"example.com/team": "orders"},
)
"""A pod whose containers own CPUs."""

CONTAINER: Final = ContainerFacts(
    name="main",
    image="registry.example/db:17",
    labels={"io.kubernetes.container.name": "main"},
    annotations={"io.kubernetes.container.restartCount": "0"},
    envs={"PATH": "/usr/local/bin:/usr/bin:/bin", "PGDATA": "/data"},
    command=("postgres",),
    args=("-c", "shared_buffers=2GB"),
    mounts=(Mount("/data", "/var/lib/kubelet/pods/0f9a3c52/volumes/data"),),
    devices=(Device("/dev/net/tun", "/dev/net/tun", "rwm"),),
    resources=Resources(
        cpu_period=100_000,
        cpu_quota=400_000,
        cpu_shares=4096,
        memory_limit=8 * _GIB,
        oom_score_adj=-997,
        hugepage_limits={"2MB": 0},
        unified={"memory.high": str(7 * _GIB)},
    ),
)
"""A container that is about to be created in this pod."""

OWN: Final = Decision(
    pool="own",
    cpus=CpuSet.parse("2-5"),
    own=CpuSet.parse("2-5"),
    mems=Mask((0,)),
    unlimited=True,
    reasons=("QoS class LSR owns whole CPUs: 4 of node 0.",),
    allowed=CpuSet.parse("2-5"),
    allowed_mems=Mask((0,)),
)
"""The placement of a container that owns CPUs."""
SHARED: Final = Decision(
    pool="shared",
    cpus=CpuSet.parse("0-1,6-15"),
    reasons=("QoS class LS runs on the shared pool.",),
    allowed=CpuSet.parse("0-1,6-15"),
    allowed_mems=Mask((0, 1)),
)
"""The placement of a container that shares CPUs."""
BE: Final = Decision(
    pool="be",
    cpus=CpuSet.parse("6-15"),
    reasons=("QoS class BE runs on the BE pool.",),
    allowed=CpuSet.parse("6-15"),
    allowed_mems=Mask((0, 1)),
)
"""The placement of a BE (best effort) container, which uses the CPUs that others leave."""

POOLS: Final = Pools(
    shared=SHARED.cpus, be=BE.cpus, owned=CpuSet.parse("2-5"), owners={_ID: CpuSet.parse("2-5")}
)
"""The node's CPUs while the owner runs, and before."""
FREE: Final = Pools(shared=CpuSet(range(16)), be=CpuSet(range(6, 16)))


@functools.cache
def machine(name: str = "machine") -> Machine:
    """Return one of ``MACHINES``."""
    return machine_from_json(MACHINES[name])


def existing(container: ContainerFacts = CONTAINER, container_id: str = _ID) -> ContainerFacts:
    """Return a container as it is after the runtime has created it."""
    return dataclasses.replace(container, id=container_id, phase="running")


def _others() -> tuple[Running, ...]:
    web = PodFacts(sandbox_id="77aa" * 16, uid="web-uid", namespace="shop", name="web-0", qos="LS")
    batch = PodFacts(
        sandbox_id="88bb" * 16,
        uid="batch-uid",
        namespace="shop",
        name="batch-0",
        qos="BE",
        kube_qos="BestEffort",
    )
    plain = ContainerFacts(name="main", image="registry.example/web:3")
    return (
        Running(web, existing(plain, "77cc" * 16), SHARED),
        Running(batch, existing(plain, "88dd" * 16), BE),
    )


def sample(name: str) -> Point:
    """Return the sample event of a point.

    Args:
        name: A key of ``POINTS``.
    """
    point: Any = POINTS[name]
    if name.startswith("validate_"):
        envs = Adjustment(envs={"PINNED": "2-5"}) if "create" in name else Adjustment(annotations={"a": "b"})
        field = "envs[PINNED]" if envs.envs else "annotations[a]"
        return point(sample(f"pre_{name.removeprefix('validate_')}"), envs, {field: "30-cpus-file"})  # type: ignore[no-any-return]
    special: dict[str, Callable[[], Point]] = {
        "pre_stop_container": lambda: PreStopContainer(POD, existing(), OWN, grace=30),
        "pre_update_container_resources": lambda: PreUpdateContainerResources(
            POD, existing(), OWN, Resources(cpu_period=100_000, cpu_quota=200_000, cpu_shares=2048), {}
        ),
        "synchronize": _synchronize,
        "machine_changed": lambda: MachineChanged(machine("before"), machine("after")),
        "pools_changed": lambda: PoolsChanged(FREE, POOLS),
        "configure": lambda: Configure({"name": "CPUS"}, "30-example"),
        "shutdown": lambda: Shutdown("stop"),
    }
    if name in special:
        return special[name]()
    return _plain(name, point)


def _synchronize() -> Synchronize:
    running = (Running(POD, existing(), OWN), *_others())
    return Synchronize(machine(), POOLS, tuple(container.pod for container in running), running)


def _plain(name: str, point: Any) -> Point:
    """Make a sample event from the names of its fields; fields without a sample keep their defaults."""
    created = CONTAINER if name == "pre_create_container" else existing()
    facts = {
        "pod": dataclasses.replace(POD, sandbox_id="") if name == "pre_run_pod_sandbox" else POD,
        "container": created,
        "decision": OWN,
        "resources": CONTAINER.resources,
        "pools": POOLS,
        "machine": machine(),
    }
    fields = [field.name for field in dataclasses.fields(point)]
    return point(**{field: facts[field] for field in fields if field in facts})  # type: ignore[no-any-return]
