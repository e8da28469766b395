"""Random bodies of intercepted calls through the interceptors, on a node in memory.

Messages that a client may send are mutated: bits, lengths, pieces of other messages, repeated fields, texts
that often break parsers. Pods of other tenants run at the same time; one of them owns CPUs.

Properties: nothing leaves the interceptors; each call is released or refused once; no rule of the node
is violated; the ledger records and the CPUs of the other tenants do not change.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any, Final

from proxy.api.cri import api_pb2 as pb
from proxy.engine.invariants import violations
from proxy.executor.context import ExecutorOptions
from proxy.telemetry import metrics
from tests.executor.conftest import PlayedCall, World
from tests.fuzz.outcome import Outcome

CALLS: Final = 60
ANSWER_S: Final = 20.0
_STATUS: Final = "scheduling.koordinator.sh/resource-status"
_CLASSES: Final = ("LSE", "LSR", "LS", "BE", "SYSTEM", "", "\u0660", "LSR ")
_WORDS: Final = (
    b"\xff\xfe\xc3\x28",
    b"\x00",
    b"0-65535",
    b"0,2,4,6",
    b"99999999999",
    b"-1",
    b'{"cpuset":"0-31"}',
    b'{"cpuset":',
    b"[" * 200,
    b"\x80" * 11,
    b"\x0b\x0b\x0b",
    b"1e999999",
    b"../../..",
    "é\u202e\u2028".encode(),
)
_TEXTS: Final = (b"fuzzed", b"qosClass", b"cpuset", b"LSR", b"kubepods", b"evil")
_METHODS: Final = (
    "RunPodSandbox",
    "StopPodSandbox",
    "RemovePodSandbox",
    "CreateContainer",
    "CreateContainer",
    "CreateContainer",
    "StartContainer",
    "StopContainer",
    "RemoveContainer",
    "UpdateContainerResources",
)


def one(rng: random.Random, outcome: Outcome) -> None:
    """Run one round: a node, its pods, and calls with mutated bodies."""
    asyncio.run(_Round(rng, outcome).run())


class _Round:
    def __init__(self, rng: random.Random, outcome: Outcome) -> None:
        self.rng, self.outcome = rng, outcome
        self.faults: list[str] = []

    async def run(self) -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, reported: self.faults.append(str(reported))
        )
        self.world = world = World(ExecutorOptions(call_timeout=5.0))
        await world.sync.once()
        try:
            await self.others()
            before = await self.records()
            for _ in range(CALLS):
                await self.call()
            await world.quiet()
            now = await self.records()
            changed = {
                key: (before.get(key), now.get(key))
                for key in {*before, *now}
                if before.get(key) != now.get(key)
            }
            assert not changed, f"records of other tenants have changed: {changed}"
            assert not violations(world.executor.state)
            assert not self.faults, self.faults
            assert "answered twice" not in world.log
            assert not world.executor.telemetry.value(metrics.INTERNAL_ERRORS), (
                world.executor.telemetry.problems()
            )
        finally:
            await world.close()

    async def others(self) -> None:
        """Pods of other tenants."""
        world = self.world
        owner = await world.pod("tenant-owner", "LSR", cpus="2-3")
        await world.run(owner, cpu_shares=2048, cpu_quota=200_000, cpu_period=100_000)
        sharer = await world.pod("tenant-sharer", "LS")
        await world.run(sharer)

    async def records(self) -> dict[str, object]:
        """Return the ledger records of other tenants, without values that follow from the pools."""
        await self.world.executor.ledger_writer.flush()
        found: dict[str, object] = {}
        for key, entry in self.world.ledger.entries.items():
            text = json.dumps(entry, sort_keys=True, default=str)
            if '"tenant-' in text:
                found[key] = text
        assert len(found) >= 4
        return found

    async def call(self) -> None:
        rng, world = self.rng, self.world
        method = rng.choice(_METHODS)
        call = PlayedCall(method, _Bytes(self.body(method)), world.log)
        self.outcome.timed(lambda: world.wire.request(call))
        try:
            async with asyncio.timeout(ANSWER_S):
                await call.over.wait()
        except TimeoutError:
            raise AssertionError(f"a {method} call is neither released nor refused: {call.body!r}") from None
        self.outcome.count("refused" if call.refused else "released")
        if call.refused is None:
            assert call.sent is not None
            # If nothing must be removed, only a suffix is added.
            assert call.sent.startswith(call.body)
            self.answer(call, method)
        call.done = True
        world.wire.finished(call, rng.choice([0, 0, 2, 5, None]) if call.refused is None else None)
        if rng.random() < 0.03:
            await world.quiet()

    def answer(self, call: PlayedCall, method: str) -> None:
        rng = self.rng
        if rng.random() < 0.5:
            return
        name = f"fuzzed-{rng.randrange(20)}"
        if method == "CreateContainer":
            good = pb.CreateContainerResponse(container_id=name).SerializeToString()
        else:
            good = pb.RunPodSandboxResponse(pod_sandbox_id=f"s-{name}").SerializeToString()
        self.world.wire.response(call, good if rng.random() < 0.9 else self.mutated(good))

    # -- bodies -------------------------------------------------------------------------------------------

    def body(self, method: str) -> bytes:
        whole = self.good(method).SerializeToString()
        return whole if self.rng.random() < 0.25 else self.mutated(whole)

    def good(self, method: str) -> Any:
        rng = self.rng
        container, sandbox = f"fuzzed-{rng.randrange(20)}", f"s-fuzzed-{rng.randrange(20)}"
        if method == "RunPodSandbox":
            return pb.RunPodSandboxRequest(config=self.config())
        if method == "CreateContainer":
            message = pb.CreateContainerRequest(pod_sandbox_id=sandbox, sandbox_config=self.config())
            message.config.metadata.name = rng.choice(["c", "main", "", "x" * 300])
            message.config.linux.resources.CopyFrom(self.resources())
            return message
        if method == "UpdateContainerResources":
            return pb.UpdateContainerResourcesRequest(container_id=container, linux=self.resources())
        if method in ("StopPodSandbox", "RemovePodSandbox"):
            return pb.StopPodSandboxRequest(pod_sandbox_id=sandbox)
        named = pb.StartContainerRequest if method == "StartContainer" else pb.StopContainerRequest
        return named(container_id=container)

    def config(self) -> pb.PodSandboxConfig:
        rng = self.rng
        uid = f"fuzzed-{rng.randrange(20)}"
        config = pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(
                name=uid, uid=uid, namespace="evil", attempt=rng.choice([0, 1, 1 << 31])
            ),
            linux=pb.LinuxPodSandboxConfig(
                cgroup_parent=rng.choice([f"/kubepods/pod{uid}", "", "/../..", "a.slice"])
            ),
        )
        config.labels["koordinator.sh/qosClass"] = rng.choice(_CLASSES)
        if rng.random() < 0.6:
            cpus = rng.choice(["4-5", "0-1", "2-3", "0-15", "6,8", "0-70000", "", "x", "0-", ",,"])
            status: Any = {"cpuset": cpus, "numaNodeResources": [{"node": rng.choice([0, 1, 7, -1, "a"])}]}
            config.annotations[_STATUS] = json.dumps(status)[: rng.choice([10, 10_000, 10_000])]
        return config

    def resources(self) -> pb.LinuxContainerResources:
        rng = self.rng
        return pb.LinuxContainerResources(
            cpu_shares=rng.choice([0, 2, 2048, -1, 1 << 62]),
            cpu_quota=rng.choice([0, -1, 200_000, 1 << 62, -(1 << 63)]),
            cpu_period=rng.choice([0, 100_000, -5, 1]),
            cpuset_cpus=rng.choice(["", "0-3", "2-3", "999", "x", "0-65535"]),
            cpuset_mems=rng.choice(["", "0", "7", "x"]),
            memory_limit_in_bytes=rng.choice([0, 1 << 30, -1]),
        )

    def mutated(self, body: bytes) -> bytes:
        rng, data = self.rng, bytearray(body)
        for _ in range(rng.choice([1, 1, 2, 5])):
            at = rng.randrange(len(data) + 1)
            how = rng.randrange(8)
            if how == 0 and data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            elif how == 1:
                data[at:at] = rng.choice(_WORDS)
            elif how == 2:
                del data[at : at + rng.choice([1, 4, 100])]
            elif how == 3:
                data[at:at] = data[: rng.randrange(len(data) + 1)]
            elif how == 4:
                data += bytes(data[: rng.randrange(len(data) + 1)])
            elif how == 5:
                data += self.good(rng.choice(_METHODS)).SerializeToString()
            elif how == 6:
                data[at:at] = rng.randbytes(rng.choice([1, 8, 300]))
            else:
                self.replace_a_word(data)
        return bytes(data)

    def replace_a_word(self, data: bytearray) -> None:
        """Replace a text by other bytes of the same length, so that lengths stay right."""
        for known in self.rng.sample(_TEXTS, len(_TEXTS)):
            at = data.find(known)
            if at >= 0:
                word = (self.rng.choice(_WORDS) * 10)[: len(known)]
                data[at : at + len(known)] = word
                return


class _Bytes:
    """A stand-in for a message that is already encoded."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def SerializeToString(self) -> bytes:  # noqa: N802
        return self._body


__all__ = ["one"]
