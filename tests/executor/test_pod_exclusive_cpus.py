"""Pods that own CPUs as a whole, chosen on the node."""

from __future__ import annotations

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.engine.invariants import violations
from tests.testkit.cri import TWO_CPUS

FOUR = {"cpu_shares": 4096, "cpu_quota": 400_000, "cpu_period": 100_000}
HALF = {"cpu_shares": 512, "cpu_quota": 50_000, "cpu_period": 100_000}
ODD = {"cpu_shares": 1536, "cpu_quota": 150_000, "cpu_period": 100_000}


def given(call) -> str:
    return pb.CreateContainerRequest.FromString(call.sent).config.linux.resources.cpuset_cpus


def test_all_containers_of_an_lse_pod_get_its_cpus(run_scenario) -> None:
    async def scenario(world) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        s = await world.pod("lse", "LSE", total=FOUR)
        assert world.on(ls) == "0-15", "no container moves before the first create"
        for name in ("main", "side"):
            call = await world.begin(s, name, **HALF)
            assert given(call) == "0-1,8-9"
            world.finish(call, f"{s}-{name}")
            await world.start(f"{s}-{name}")
        assert world.on(ls) == "2-7,10-15"
        other = await world.pod("other", "LSR", total=FOUR)
        assert given(await world.begin(other, "c", **FOUR)) == "2-3,10-11"
        assert violations(world.executor.state) == []
        stop = await world.call("StopPodSandbox", pb.StopPodSandboxRequest(pod_sandbox_id=s))
        world.wire.finished(stop, 0)
        await world.quiet()
        assert world.on(ls) == "0-1,4-9,12-15"
        assert f"p/{s}" not in world.ledger.entries

    run_scenario(scenario, static=True)


def test_a_pod_without_whole_cpus_is_refused_and_leaves_nothing_reserved(run_scenario) -> None:
    async def scenario(world) -> None:
        reported = await world.pod("lse", "LSE", total=ODD, may_be_refused=True)
        assert reported.startswith(
            "cannot place ns/lse: LSE pod: its containers request about 1500m CPU together"
        )
        assert (len(world.executor.state.pods), world.ledger.entries) == (0, {})
        assert [r.explanation.verdict.reason for r in world.executor.history.find("ns/lse")] == [
            "InvalidCPURequest"
        ]
        assert await world.pod("lsr", "LSR", total=ODD, may_be_refused=True) != "s-lsr"
        assert await world.pod("ls", "LS", total=ODD) == "s-ls"

    run_scenario(scenario, static=True)


def test_chosen_cpus_are_in_the_ledger_before_the_sandbox_is_made(run_scenario) -> None:
    async def scenario(world) -> None:
        s = await world.pod("lse", "LSE", total=FOUR)
        await world.executor.ledger_writer.flush()
        record = world.ledger.entries[f"p/{s}"]
        assert (record["cpuset"], record["chosen"], record["aside"]["cpus"]) == ("0-1,8-9", True, "0-1,8-9")

    run_scenario(scenario, static=True)


@pytest.mark.parametrize("class_and_parent", [("LSE",), ("LSR", "burstable")])
def test_the_cpus_of_a_pod_follow_its_resize_when_its_container_is_created_again(
    run_scenario, class_and_parent
) -> None:
    async def scenario(world) -> None:
        s = await world.pod("a", *class_and_parent, total=FOUR)
        ls = await world.run(await world.pod("ls", "LS"))
        await world.run_with_sum(s, "first", **FOUR)
        await world.update("first", **TWO_CPUS)
        assert world.on("first") == "0-1,8-9", "an owner keeps its CPUs while it runs"
        await world.stop("first")
        await world.run_with_sum(s, "second", **TWO_CPUS)
        assert (world.on("second"), world.on(ls)) == ("0,8", "1-7,9-15")
        await world.close()
        world.boot()
        assert str(world.executor.state.pods[s].cpuset) == "0,8", "the ledger has it"
        for _ in range(3):  # until no call of the daemon before can be under way
            await world.sync.once()
            world.now += 3
        await world.stop("second")
        await world.run_with_sum(s, "third", **FOUR)
        assert (world.on("third"), world.on(ls)) == ("0-1,8-9", "2-7,10-15")
        assert violations(world.executor.state) == []

    run_scenario(scenario, static=True)


def test_a_pod_with_unknown_cgroup_parent_owns_the_chosen_cpus(run_scenario) -> None:
    async def scenario(world) -> None:
        metadata = pb.PodSandboxMetadata(name="lsr", uid="lsr", namespace="ns")
        config = pb.PodSandboxConfig(metadata=metadata, labels={"koordinator.sh/qosClass": "LSR"})
        resources = pb.LinuxContainerResources(**FOUR)
        requested = pb.PodSandboxConfig(linux=pb.LinuxPodSandboxConfig(resources=resources))
        requested.MergeFrom(config)
        call = await world.call("RunPodSandbox", pb.RunPodSandboxRequest(config=requested))
        world.wire.response(call, pb.RunPodSandboxResponse(pod_sandbox_id="s").SerializeToString())
        world.wire.finished(call, 0)
        for name in ("main", "side"):
            request = pb.CreateContainerRequest(pod_sandbox_id="s", sandbox_config=config)
            request.config.metadata.name = name
            request.config.linux.resources.CopyFrom(pb.LinuxContainerResources(**HALF))
            call = await world.call("CreateContainer", request)
            assert given(call) == "0-1,8-9"
            world.finish(call, name)
        assert list(world.executor.state.owners) == ["lsr"]

    run_scenario(scenario, static=True)
