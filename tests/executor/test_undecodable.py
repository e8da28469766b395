"""Requests with strings that are not UTF-8, and requests that cannot be decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.executor.runtime_ports import RuntimeContainer
from proxy.model.mode import NodeMode
from proxy.model.options import TopologyPolicy
from proxy.telemetry import metrics
from proxy.wire.protobuf import encode_field

ODD = b"\xff\xfe\xc3\x28"
DEEP = b"\x9b\x06" * 200 + b"\x9c\x06" * 200
"""Groups in groups of a field that is not declared: Go skips them, and our decoder gives up at a hundred."""
STATUS = b"scheduling.koordinator.sh/resource-status"


class Raw:
    """A message that is already encoded."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def SerializeToString(self) -> bytes:  # noqa: N802  as protobuf's
        return self.raw


def entry(number: int, key: bytes, value: bytes) -> bytes:
    return encode_field(number, encode_field(1, key) + encode_field(2, value))


def sandbox(qos: str = "", *annotations: tuple[bytes, bytes], kube: str = "") -> bytes:
    parent = f"/kubepods/{kube}/podp".replace("//", "/").encode()
    meta = encode_field(1, encode_field(1, b"p") + encode_field(2, b"u") + encode_field(3, b"ns"))
    label = entry(6, b"koordinator.sh/qosClass", qos.encode()) if qos else b""
    return (
        meta
        + label
        + b"".join(entry(7, *each) for each in annotations)
        + encode_field(8, encode_field(1, parent))
    )


def create(config: bytes = b"", *pods: bytes, pod_id: bytes = b"s") -> Raw:
    made = encode_field(1, encode_field(1, b"c")) + config
    return Raw(
        encode_field(1, pod_id) + encode_field(2, made) + b"".join(encode_field(3, pod) for pod in pods)
    )


def cpus(call: Any) -> str:
    """Return the last cpuset that a request names, without decoding the rest."""
    facts = pb.CreateContainerFacts.FromString(call.sent)
    return facts.config.linux.resources.cpuset_cpus.decode()


@pytest.mark.parametrize(
    "odd",
    [
        create(b"", sandbox("LS", (b"note", ODD))),
        create(b"", sandbox("LS", (ODD, b"note"))),
        create(entry(10, b"note", ODD) + encode_field(4, ODD), sandbox("LS")),
        create(encode_field(7, encode_field(2, b"/dev/" + ODD)), sandbox("LS", (b"volcano.sh/x" + ODD, ODD))),
    ],
    ids=["value", "key", "container", "paths"],
)
def test_a_create_with_odd_strings_is_placed_and_keeps_its_bytes(
    run_scenario: Callable[..., None], odd: Raw
) -> None:
    async def scenario(world: Any) -> None:
        await world.run(await world.pod("lse", "LSE", cpus="2-3"))
        call = await world.call("CreateContainer", odd)
        assert cpus(call) == "0-1,4-15"
        assert call.sent.startswith(odd.raw)

    run_scenario(scenario)


def test_an_owner_with_odd_strings_gets_its_cpus(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        pod = sandbox("LSE", (b"note", ODD), (STATUS, b'{"cpuset":"2-3"}'))
        call = await world.call("RunPodSandbox", Raw(encode_field(1, pod)))
        assert call.sent == encode_field(1, pod)
        world.wire.response(call, pb.RunPodSandboxResponse(pod_sandbox_id="s").SerializeToString())
        world.wire.finished(call, 0)
        assert cpus(await world.call("CreateContainer", create(b"", pod))) == "2-3"

    run_scenario(scenario)


@pytest.mark.parametrize(("qos", "refuses"), [("LSR", True), ("LS", False)])
def test_an_odd_claim_is_malformed(run_scenario: Callable[..., None], qos: str, refuses: bool) -> None:
    async def scenario(world: Any) -> None:
        pod = sandbox(qos, (STATUS, b'{"note":"' + ODD + b'","cpuset":"2-3"}'))
        call = await world.call("CreateContainer", create(b"", pod))
        assert (call.refused is not None) is refuses
        assert refuses or cpus(call) == "0-15"
        assert any("ns/p" in each["what"] for each in world.executor.telemetry.problems())

    run_scenario(scenario)


def test_a_duplicate_sandbox_configuration_is_merged(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        first = sandbox("LSE", (STATUS, b'{"cpuset":"2-3"}'))
        call = await world.call("CreateContainer", create(b"", first, encode_field(8, encode_field(4, b""))))
        assert cpus(call) == "2-3"
        twice = await world.call("CreateContainer", create(b"", sandbox(), entry(7, b"a", b"b"), pod_id=b"t"))
        assert cpus(twice) == "0-1,4-15"
        assert world.executor.state.pods["t"].name == "p"

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("request_", "refuses", "policy"),
    [
        (create(DEEP, sandbox("LSR")), True, None),
        (create(DEEP, sandbox("LS")), False, None),
        (create(DEEP, sandbox("")), False, TopologyPolicy.BEST_EFFORT),
        (create(DEEP, sandbox("")), True, TopologyPolicy.RESTRICTED),
        (create(DEEP, sandbox("", kube="burstable")), False, TopologyPolicy.RESTRICTED),
        (create(b"", sandbox("LS") + DEEP), True, None),
        (Raw(DEEP), True, None),
    ],
    ids=["LSR", "LS", "best-effort", "Guaranteed", "Burstable", "unknown pod", "nothing known"],
)
def test_a_create_that_cannot_be_decoded(
    run_scenario: Callable[..., None], request_: Raw, refuses: bool, policy: TopologyPolicy | None
) -> None:
    async def scenario(world: Any) -> None:
        world.executor.reconcile_requested.clear()
        call = await world.call("CreateContainer", request_)
        assert (call.refused is not None) is refuses
        assert refuses or call.sent == request_.raw
        assert world.executor.reconcile_requested.is_set()
        assert world.executor.telemetry.value(metrics.REQUESTS_UNDECODABLE) == 1
        assert any(
            "cannot decode a request method=CreateContainer" in each["what"]
            for each in world.executor.telemetry.problems()
        )

    run_scenario(scenario, rules={"policy": policy} if policy else None)


@pytest.mark.parametrize(("qos", "refuses"), [("LSE", True), ("LS", False)])
def test_a_create_in_a_known_pod_needs_no_sandbox_configuration(
    run_scenario: Callable[..., None], qos: str, refuses: bool
) -> None:
    async def scenario(world: Any) -> None:
        known = await world.pod("p", qos, cpus="2-3")
        call = await world.call("CreateContainer", create(DEEP, DEEP, pod_id=known.encode()))
        assert (call.refused is not None) is refuses

    run_scenario(scenario)


def test_in_observe_mode_everything_is_forwarded(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        for method in ("CreateContainer", "RunPodSandbox"):
            assert (await world.call(method, Raw(DEEP))).sent == DEEP

    run_scenario(scenario, mode=NodeMode.OBSERVE)


def test_a_container_with_an_unreadable_entry_keeps_its_cpus(run_scenario: Callable[..., None]) -> None:
    from proxy.executor.runtime_ports import RuntimeList

    async def scenario(world: Any) -> None:
        owner = await world.run(await world.pod("lse", "LSE", cpus="2-3"))
        other = await world.run(await world.pod("ls", "LS"))
        for unread in ({owner}, {""}):
            world.runtime.list_containers = lambda container_id="", unread=unread: RuntimeList(
                [c for c in world.runtime.containers.values() if c.id not in (owner, "")], unread
            )
            world.runtime.list_pods = lambda: RuntimeList([], {"s-lse", "s-ls"})
            await world.sync.once()
            assert world.executor.state.owners
            assert (world.on(owner), world.on(other)) == ("2-3", "0-1,4-15")
        world.runtime.list_containers = lambda container_id="": RuntimeList([], {other})
        await world.sync.once()
        assert not world.executor.state.owners, "a container that is certainly not in the list is gone"

    run_scenario(scenario)


def test_one_container_that_cannot_be_adopted_does_not_affect_other_containers(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: Any) -> None:
        sandbox_id = await world.pod("p", "LS")
        for name in ("a", "b", "c"):
            world.runtime.containers[name] = RuntimeContainer(name, sandbox_id, name, 0, "RUNNING")
        take_in = world.sync.adoption._take_in

        def faulty(seen: Any, *rest: Any) -> None:
            if seen.id == "a":
                raise UnicodeError("odd")
            take_in(seen, *rest)

        monkeypatch.setattr(world.sync.adoption, "_take_in", faulty)
        await world.sync.once()
        assert world.executor.state.containers.keys() == {"b", "c"}

    run_scenario(scenario)
