"""A pod with an annotation that is not UTF-8, on a real containerd, which accepts it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest
from cri import cpuset_of, online
from private_runtime import PrivateRuntime, wait_for

from proxy.api.cri import api_pb2 as pb
from proxy.model.idset import CpuSet
from tests.go_strings import MARK, ODD, on_wire

if TYPE_CHECKING:
    from daemon import ModeledNode

pytestmark = pytest.mark.e2e

ALL = online()
LAST = CpuSet([max(ALL)])
REST = ALL - LAST
LIMIT_S = 30


def tolerant(client: Any) -> None:
    """Make a client replace ``MARK`` by ``ODD`` in its requests, and ``ODD`` by ``MARK`` in responses."""

    def method(name: str, answer: str = "") -> Any:
        kind = getattr(pb, answer or f"{name}Response")
        call: Any = client.channel.unary_unary(
            f"/runtime.v1.RuntimeService/{name}",
            request_serializer=on_wire,
            response_deserializer=lambda raw: kind.FromString(raw.replace(ODD, MARK.encode())),
        )
        return call

    client.method = method


def is_ready(node: ModeledNode) -> bool:
    return bool(node.daemon.status()["ready"])


def test_a_pod_with_an_odd_annotation_is_placed_and_the_daemon_continues(
    node: ModeledNode, runtime: PrivateRuntime
) -> None:
    tolerant(node.cri)
    owner = node.spawn("lse", LAST)
    try:
        pod = node.cri.run_pod("odd", annotations={"note": MARK}, cgroup_parent="/kubepods/burstable/pod-odd")
    except grpc.RpcError as error:
        pytest.skip(f"this containerd rejects such strings: {error.details()}")
    try:
        odd = node.cri.run(pod, cpu_shares=512)
        assert cpuset_of(odd).cpus == REST
        node.daemon.kill9()
        node.daemon.start()
        wait_for("the daemon to be ready", lambda: is_ready(node), LIMIT_S)
        late = node.spawn("ls")
        assert cpuset_of(late).cpus == REST
        assert (cpuset_of(odd).cpus, cpuset_of(owner).cpus) == (REST, LAST)
        passes = node.daemon.status()["counters"]["passes"]
        wait_for("a reconcile", lambda: node.daemon.status()["counters"]["passes"] > passes, 2 * LIMIT_S)
        node.remove(owner)
        wait_for("the CPUs to be released", lambda: cpuset_of(odd).cpus == ALL, LIMIT_S)
    finally:
        node.cri.stop_pod(pod)
        node.cri.remove_pod(pod)
