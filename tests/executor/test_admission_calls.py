"""Which pods may own CPUs: what a pod's author can claim under the default configuration."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.config.admission import AdmissionConfig
from proxy.executor.bad_input import VERDICTS
from proxy.executor.runtime_ports import RuntimeContainer, RuntimeDetail, RuntimePod
from proxy.executor.status_data import node_page
from proxy.model.admission import AdmissionRule, AdmissionRules, BeyondLimit, Namespaces, ResourceStatusMode
from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode
from proxy.model.workload import Pool
from proxy.observe.explain_data import history_page
from proxy.observe.metrics import metrics as exposition
from proxy.telemetry import metrics
from tests.testkit.changed_copy import changed_copy

World = Any
DEFAULT = AdmissionConfig().rules
RULES = {"admission": DEFAULT}
TENTH = {"cpu_shares": 102, "cpu_quota": 10_000, "cpu_period": 100_000}
KEPT = {"node_reservation": CpuSet([0]), "system": CpuSet([2, 3]), "reserved": CpuSet([1])}


def whole(count: int) -> dict[str, int]:
    return {"cpu_shares": 1024 * count, "cpu_quota": 100_000 * count, "cpu_period": 100_000}


async def honest(world: World, uid: str, qos: str, cpus: str, **more: Any) -> str:
    """A pod as Koordinator's scheduler binds it: it requests as many CPUs as its annotation names."""
    resources = whole(len(CpuSet.parse(cpus)))
    sandbox = await world.pod(uid, qos, "burstable", cpus, total=resources, **more)
    container: str = await world.run(sandbox, **resources)
    return container


@pytest.mark.parametrize(
    ("qos", "kube", "cpus", "rule"),
    [
        ("", "besteffort", "0-14", AdmissionRule.RESERVED_CPUS),
        ("", "besteffort", "4-14", AdmissionRule.REQUEST),
        ("", "besteffort", "4", AdmissionRule.REQUEST),
        ("LSE", "burstable", "4-9", AdmissionRule.REQUEST),
        ("LSE", "burstable", "0-5", AdmissionRule.RESERVED_CPUS),
        ("LS", "burstable", "4-14", AdmissionRule.REQUEST),
        ("SYSTEM", "besteffort", "", AdmissionRule.SYSTEM_NAMESPACE),
    ],
)
@pytest.mark.parametrize("with_sum", [True, False])
def test_an_author_cannot_take_the_node(
    run_scenario: Any, qos: str, kube: str, cpus: str, rule: AdmissionRule, with_sum: bool
) -> None:
    """Pods request a tenth of a CPU; without a sum (kubelet before 1.23) the create is rejected instead."""

    async def scenario(world: World) -> None:
        shared = await world.run(await world.pod("web", "LS"))
        agent = await world.run(await world.pod("agent", "SYSTEM", namespace="kube-system"))
        before = world.on(shared), world.on(agent)
        assert before == ("1,4-15", "2-3")
        total = {"total": TENTH} if with_sum else {}
        answer = await world.pod("taker", qos, kube, cpus, may_be_refused=True, **total)
        if (
            not with_sum
            and rule is not AdmissionRule.SYSTEM_NAMESPACE
            and rule is not AdmissionRule.RESERVED_CPUS
        ):
            assert answer == "s-taker"
            call = await world.begin(answer, **TENTH)
            assert call.refused is not None
            assert call.refused[0] == 9
            answer = call.refused[1]
        assert answer.startswith("cannot place ns/taker")
        assert (world.on(shared), world.on(agent)) == before
        assert not world.executor.state.owners
        assert world.executor.telemetry.value(metrics.ADMISSION_LIMITS, rule=rule, verdict="rejected") == 1
        trading = await honest(world, "trading", "LSR", "4-9")
        assert world.on(trading) == "4-9"
        world.check()

    run_scenario(scenario, rules={**RULES, **KEPT})


def test_scheduled_pods_do_not_lose_cpus_to_earlier_claims(run_scenario: Any) -> None:
    """Several pods and containers, escaped and duplicate keys: none of them owns a CPU."""

    async def scenario(world: World) -> None:
        texts = ('{"cpu\\u0073et":"0-14"}', '{"CPUSET":"0-14"}', '{"cpuset":"0","CpuSet":"0-14"}',
                 '{"cpuset":"0-14","numaNodeResources":[{"node":0,"resources":{"cpu":"15"}}]}')  # fmt: skip
        for number, text in enumerate(texts):
            uid = f"evil{number}"
            sum_of_two = {"cpu_shares": 204, "cpu_quota": 20_000, "cpu_period": 100_000}
            answer = await world.pod(
                uid, "", "besteffort", annotation=text, total=sum_of_two, may_be_refused=True
            )
            assert "may name" not in answer
            assert "cannot place" in answer
            untold = await world.pod(f"{uid}x", "", "besteffort", annotation=text)
            for name in ("a", "b"):
                assert (await world.begin(untold, name, **TENTH)).refused is not None
        assert world.on(await honest(world, "one", "LSR", "0-3,8-9")) == "0-3,8-9"
        assert world.on(await honest(world, "two", "LSE", "4-7,12-13")) == "4-7,12-13"
        assert await world.executor.ledger_writer.flush() is None
        world.check()

    run_scenario(scenario, rules=RULES)


def test_a_pod_of_several_containers_owns_what_they_request_together(run_scenario: Any) -> None:
    async def scenario(world: World) -> None:
        sandbox = await world.pod("db", "LSR", "burstable", "4-7", total=whole(4))
        ids = [await world.run(sandbox, name, **whole(2)) for name in ("main", "backup")]
        assert {world.on(i) for i in ids} == {"4-7"}
        world.check()

    run_scenario(scenario, rules=RULES)


def test_the_latest_requests_of_a_sandbox_count(run_scenario: Any) -> None:
    """Requests are resized in place; kubelet sends the sum again with each create."""

    async def scenario(world: World) -> None:
        sandbox = await world.pod("db", "LS", "burstable", "4-7", total=whole(4))
        request = pb.CreateContainerRequest(pod_sandbox_id=sandbox)
        request.config.metadata.name = "main"
        request.config.linux.resources.CopyFrom(pb.LinuxContainerResources(**whole(4)))
        request.sandbox_config.linux.resources.CopyFrom(pb.LinuxContainerResources(**whole(1)))
        call = await world.call("CreateContainer", request)
        assert call.refused is not None
        assert "names 4 CPUs, and its containers request 1 whole CPU together" in call.refused[1]
        assert world.executor.state.pods[sandbox].total.cpu_shares == 1024

    run_scenario(scenario, rules=RULES)


def test_a_restart_changes_nothing_for_owners(run_scenario: Any) -> None:
    """The record stays and holds the request of the pod, so the pod's next container is admitted too."""

    async def scenario(world: World) -> None:
        one = await honest(world, "one", "LSR", "0-3,8-9")
        sandbox = await world.pod("two", "LSE", "burstable", "4-7", total=whole(4))
        await world.run(sandbox, "main", **whole(2))
        await world.executor.ledger_writer.flush()
        world.boot()
        await world.sync.once()
        assert world.on(one) == "0-3,8-9"
        backup = await world.run(sandbox, "backup", **whole(2))
        assert world.on(backup) == "4-7"
        assert not [
            name for name, n in world.executor.telemetry.registry.page().items() if "admission_" in name and n
        ]
        world.check()

    run_scenario(scenario, rules=RULES)


def test_an_owner_recorded_under_other_rules_keeps_its_cpus(run_scenario: Any) -> None:
    async def scenario(world: World) -> None:
        taker = await world.run(await world.pod("taker", "", "besteffort", "0-13"), **TENTH)
        assert world.on(taker) == "0-13"
        await world.executor.ledger_writer.flush()
        world.rules = RULES
        world.boot()
        await world.sync.once()
        assert world.on(taker) == "0-13", "a running container keeps its CPUs"
        await world.stop(taker)
        call = await world.begin("s-taker", **TENTH)
        assert call.refused is not None
        assert await honest(world, "one", "LSR", "0-3,8-9")
        world.check()

    run_scenario(scenario)


def _lose_the_ledger(world: World) -> None:
    world.ledger.entries.clear()
    world.boot()


def test_honest_owners_are_adopted_without_a_ledger(run_scenario: Any) -> None:
    """One of several containers has just crashed; the pod requests the sum of all."""

    async def scenario(world: World) -> None:
        sandbox = await world.pod("db", "LSR", "burstable", "4-7", total=whole(4))
        ids = [await world.run(sandbox, name, **whole(2)) for name in ("main", "backup")]
        for container_id in ids:
            world.runtime.details[container_id] = RuntimeDetail(
                f"/kubepods/burstable/poddb/{container_id}", 2048, -1, 100_000, cpuset_cpus="4-7"
            )
        world.end(ids[1])
        _lose_the_ledger(world)
        await world.sync.once()
        container = world.executor.state.containers[ids[0]]
        assert container.placement.pool is Pool.OWN
        assert world.on(ids[0]) == "4-7"
        world.check()

    run_scenario(scenario, rules=RULES)


def test_claims_of_containers_that_are_adopted_are_bounded_too(run_scenario: Any) -> None:
    async def scenario(world: World) -> None:
        annotation = {"scheduling.koordinator.sh/resource-status": '{"cpuset":"0-14"}'}
        world.runtime.pods["s-evil"] = RuntimePod("s-evil", "evil", "ns", "evil", 0, True, {}, annotation)
        for name in ("a", "b"):
            world.runtime.containers[name] = RuntimeContainer(name, "s-evil", name, 0, "RUNNING")
            world.runtime.details[name] = RuntimeDetail(
                f"/kubepods/besteffort/podevil/{name}", 102, -1, 100_000, cpuset_cpus="0-14"
            )
            world.cgroups.sets[name] = CpuSet.parse("0-14")
        await world.sync.once()
        assert not world.executor.state.owners
        assert world.executor.telemetry.value(metrics.ADMISSION_LIMITS, rule="request", verdict="shared") == 2
        assert any("names 15 CPUs" in problem for problem in world.logged)
        assert world.on("a") == "0-15"
        world.check()

    run_scenario(scenario, reconciled=False, rules=RULES)


def test_answers_name_no_other_pod(run_scenario: Any) -> None:
    async def scenario(world: World) -> None:
        await honest(world, "secret-project", "LSE", "4-7", namespace="tenant-a")
        sandbox = await world.pod("mine", "LSR", "burstable", "6-9", total=whole(4), namespace="tenant-b")
        call = await world.begin(sandbox, **whole(4))
        assert call.refused == (
            9,
            "cannot give CPUs 6-9 to tenant-b/mine/c: CPUs 6-7 are owned by another pod already",
        )
        full = "CPUs 6-7 are owned by tenant-a/secret-project already"
        assert any(full in line for line in world.logged), "the log names the other pod"
        page = history_page(world.executor.history, {"query": "tenant-b/mine"})
        assert full in page["records"][-1]["decision"]["verdict"]["message"]
        assert any(full in problem["what"] for problem in node_page(world.executor)["problems"])

    run_scenario(scenario, rules=RULES)


def test_answers_name_other_pods_if_that_is_configured(run_scenario: Any) -> None:
    async def scenario(world: World) -> None:
        await honest(world, "other", "LSE", "4-7")
        sandbox = await world.pod("mine", "LSR", "burstable", "6-9", total=whole(4))
        call = await world.begin(sandbox, **whole(4))
        assert call.refused is not None
        assert call.refused[1].endswith("CPUs 6-7 are owned by ns/other already")

    run_scenario(scenario, rules={"admission": changed_copy(DEFAULT, name_others=True)})


def test_a_container_that_cannot_be_moved_is_not_named_either(run_scenario: Any) -> None:
    async def scenario(world: World) -> None:
        stuck = await world.run(await world.pod("secret", "LS", namespace="tenant-a"))
        world.cgroups.broken.add(stuck)
        sandbox = await world.pod("mine", "LSR", "burstable", "6-9", total=whole(4))
        call = await world.begin(sandbox, **whole(4))
        assert call.refused == (
            9,
            "cannot free CPUs for ns/mine/c: the kernel refuses to move another container off them",
        )
        assert any(stuck in line for line in world.logged)

    run_scenario(scenario, rules=RULES)


def test_rejections_are_counted_by_rule_and_reported_once_a_pod(run_scenario: Any) -> None:
    async def scenario(world: World) -> None:
        for _ in range(3):
            await world.pod("evil", "", "besteffort", "0-14", total=TENTH, may_be_refused=True)
        text = exposition({}, world.executor.telemetry.registry)
        assert 'topoproxy_admission_limits_total{rule="request",verdict="rejected"} 3' in text
        assert 'topoproxy_admission_limits_total{rule="shared-floor",verdict="shared"} 0' in text
        assert 'topoproxy_bad_input_total{kind="admission"} 1' in text
        assert text.count("topoproxy_admission_limits_total{") == len(VERDICTS) * len(AdmissionRule)
        (problem,) = [p["what"] for p in node_page(world.executor)["problems"] if "ns/evil" in p["what"]]
        assert "request 0 whole CPUs" in problem
        page = history_page(world.executor.history, {"query": "ns/evil"})
        assert page["records"][-1]["decision"]["verdict"]["reason"] == "AdmissionRequest"

    run_scenario(scenario, rules=RULES)


def test_a_pod_shares_if_that_is_configured(run_scenario: Any) -> None:
    async def scenario(world: World) -> None:
        evil = await world.run(await world.pod("evil", "LSE", "burstable", "0-13", total=TENTH), **TENTH)
        late = await world.run(
            await world.pod("floor", "LSR", "burstable", "0-12", total=whole(13)), **whole(13)
        )
        system = await world.run(await world.pod("agent", "SYSTEM"))
        assert [world.on(i) for i in (evil, late, system)] == ["0-13"] * 3
        counters = world.executor.telemetry.registry.page()
        shared = {name: n for name, n in counters.items() if name.startswith("admission_") and n}
        assert shared["admission_request_shared"] >= 1
        assert shared["admission_shared-floor_shared"] >= 1
        assert shared["admission_system-namespace_shared"] >= 1
        assert not any(name.endswith("rejected") for name in shared)
        world.check()

    rules = changed_copy(DEFAULT, beyond=BeyondLimit.SHARE)
    run_scenario(scenario, rules={"admission": rules, "system": CpuSet([14, 15])})


def test_in_mode_observe_a_rejection_is_reported_and_the_call_continues(run_scenario: Any) -> None:
    async def scenario(world: World) -> None:
        sandbox = await world.pod("evil", "", "besteffort", "0-14", total=TENTH)
        call = await world.begin(sandbox, **TENTH)
        assert call.refused is None
        assert call.sent == call.body
        assert any("names 15 CPUs" in line for line in world.logged)

    run_scenario(scenario, rules=RULES, mode=NodeMode.OBSERVE)


def test_the_old_behaviour_can_be_configured(run_scenario: Any) -> None:
    """With the settings of docs/admission.md, any pod owns the CPUs that its annotation names."""
    rules = AdmissionConfig(
        resource_status=ResourceStatusMode.FOLLOW,
        system_namespaces=Namespaces(("*",)),
        floor=0,
        numa_floor=0,
        name_others=True,
    ).rules

    async def scenario(world: World) -> None:
        taker = await world.run(await world.pod("taker", "", "besteffort", "0-14"), **TENTH)
        assert world.on(taker) == "0-14"
        world.check()

    run_scenario(scenario, rules={"admission": rules, "system": CpuSet([2])})
    assert rules == AdmissionRules(), "the rules of a node without a configuration"
