"""Unusual creates that a runtime executes: the daemon decides about them, or at least reports them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_pods import QOS, STATUS

from proxy.admin.client import query_admin
from proxy.api.cri import api_pb2 as pb
from proxy.model.errors import TopoproxyError
from tests.security.tenants import Node

SECONDS = 5.0


@pytest.fixture
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A reconciled daemon in front of a light runtime; no periodic reconcile runs during the test."""
    import procs

    with tempfile.TemporaryDirectory(prefix="tu") as name:
        directory = Path(name)
        runtime = procs.start(
            "the runtime", procs.backend_argv(directory / "r.sock"), directory / "r.sock", malloc=True
        )
        with procs.ended([runtime]) as running:
            running.append(procs.TOPOPROXY.start(directory, runtime.sock))
            wait_until(lambda: page(running[-1])["ready"])
            yield running[-1]


def page(daemon: Any) -> dict[str, Any]:
    status = query_admin(daemon.sock.parent / "admin.sock", "/status")
    assert isinstance(status, dict)
    return status


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    """Wait until a condition is true; a missing admin socket counts as not true."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(TopoproxyError):
            if condition():
                return
        assert time.monotonic() < end, "the condition is not true in time"
        time.sleep(0.02)


def send(daemon: Any, path: bytes, body: bytes) -> bytes:
    """Make one call on its own connection, and return all bytes of the answer."""
    from tests.frontends.cri import attacks

    client = attacks.Client(daemon.sock)
    client.end.settimeout(SECONDS)
    data = attacks.frame(attacks.DATA, 1, 1, body)
    client.end.sendall(attacks.open_stream(1, path) + data)
    received = bytearray()
    while True:
        received += client.end.recv(65_536)
        if ended(bytes(received)):
            client.end.close()
            return bytes(received)


def ended(data: bytes) -> bool:
    """Return whether the answer on stream 1 is complete."""
    at = 0
    while len(data) - at >= 9:
        size, flags = int.from_bytes(data[at : at + 3], "big"), data[at + 4]
        if data[at + 3] in (0, 1) and flags & 1 and len(data) - at >= 9 + size:
            return True
        at += 9 + size
    return False


def create() -> bytes:
    import messages

    return messages.create_request(5)


@pytest.mark.parametrize("behind", [None, b"\x00\x00\x00"], ids=["a second message", "three bytes"])
def test_bytes_after_the_message_are_reported_and_trigger_a_reconcile(
    daemon: Any, behind: bytes | None
) -> None:
    from tests.frontends.cri import attacks

    before = page(daemon)
    message = attacks.grpc(create())
    send(daemon, attacks.CREATE, message + (message if behind is None else behind))
    after = page(daemon)
    new = [p["what"] for p in after["problems"] if p not in before["problems"]]
    assert any("a request is not one plain message method=CreateContainer" in text for text in new), new
    assert after["counters"]["calls_not_plain"] == 1
    passes = before["counters"]["passes"]
    wait_until(lambda: page(daemon)["counters"]["passes"] > passes, SECONDS)


def test_a_container_is_placed_despite_a_path_without_a_leading_slash(daemon: Any) -> None:
    from tests.frontends.cri import attacks

    usual = send(daemon, attacks.CREATE, attacks.grpc(create()))
    bare = send(daemon, attacks.CREATE[1:], attacks.grpc(create()))
    cpus = Path("/sys/devices/system/cpu/online").read_text().strip()
    assert f"{cpus}|".encode() in usual
    assert f"{cpus}|".encode() in bare


def test_a_sandbox_config_in_two_parts_is_read_as_the_runtime_reads_it(tmp_path: Path) -> None:
    """Go merges the parts of a message; the last part alone would describe another pod."""

    async def scenario() -> str:
        node = Node(tmp_path)
        try:
            await node.sync.once()
            first = pb.CreateContainerRequest(pod_sandbox_id="s-1")
            first.config.metadata.name = "main"
            resources = pb.LinuxContainerResources(cpu_period=100_000, cpu_quota=200_000, cpu_shares=2048)
            first.config.linux.resources.CopyFrom(resources)
            meta = pb.PodSandboxMetadata(name="p", uid="u", namespace="tenant-good")
            status = {STATUS: json.dumps({"cpuset": "2-3"})}
            linux = pb.LinuxPodSandboxConfig(cgroup_parent="/kubepods/podu", resources=resources)
            parts = (
                pb.PodSandboxConfig(metadata=meta, labels={QOS: "LSE"}, annotations=status),
                pb.PodSandboxConfig(linux=linux),
            )
            raw = first.SerializeToString() + b"".join(
                pb.CreateContainerRequest(sandbox_config=part).SerializeToString() for part in parts
            )
            call = node.played("CreateContainer", first)
            call.replace_body(raw)
            node.wire.request(call)
            await asyncio.wait_for(call.over.wait(), 20)
            assert call.refused is None, call.refused
            return pb.CreateContainerRequest.FromString(call.sent or b"").config.linux.resources.cpuset_cpus
        finally:
            await node.close()
            node.ledger.close()

    assert asyncio.run(scenario()) == "2-3"
