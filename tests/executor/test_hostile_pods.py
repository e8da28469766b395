"""Hostile pods: what is reported, recorded and remembered about them."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest

from proxy.executor.decision_history import DecisionHistory
from proxy.executor.ledger_codec import dump, load_container, load_pod
from proxy.executor.runtime_ports import RuntimeContainer, RuntimePod
from proxy.model.defects import DefectKind, InputDefect
from proxy.model.explanation import Explanation
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Bounds
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, QosClass, Request, Verdict
from tests.testkit.captured_log import telemetry
from tests.testkit.changed_copy import changed_copy

SPARSE = json.dumps({"cpuset": ",".join(map(str, range(0, 65536, 2)))})
OVERLAPPING = json.dumps({"cpuset": ",".join(["0-65535"] * 31000)})
SURROGATE = '{"numaNodeResources":[{"node":0,"resources":{"\\ud800":"abc"}}]}'
STATUS = "scheduling.koordinator.sh/resource-status"


def longest(value: object) -> int:
    """Return the length of the longest text within a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return max(map(longest, (*value, *value.values())), default=0)
    return max(map(longest, value), default=0) if isinstance(value, list | tuple) else 0


def check_little_is_said(world: Any) -> None:
    assert max(map(len, world.logged)) <= 2000
    assert longest(world.executor.telemetry.problems()) <= 2000
    assert (
        longest(
            [msgspec.to_builtins(r.explanation, enc_hook=str) for r in world.executor.history.find("ns/evil")]
        )
        <= 2000
    )
    records = {
        key: json.dumps(value, ensure_ascii=False).encode() for key, value in world.ledger.entries.items()
    }
    assert max(map(len, records.values())) < 4000


@pytest.mark.parametrize(
    "annotation", [SPARSE, OVERLAPPING, SURROGATE], ids=["sparse", "overlapping", "surrogate"]
)
@pytest.mark.parametrize("qos", ["LSR", "LS", "BE", ""])
def test_reports_and_records_of_a_hostile_annotation_are_short(
    run_scenario, annotation: str, qos: str
) -> None:
    async def scenario(world: Any) -> None:
        honest = await world.run(await world.pod("honest", "LSE", "", "2-3"))
        began = time.thread_time()
        call = await world.begin(await world.pod("evil", qos, "burstable", annotation=annotation))
        assert time.thread_time() - began < 0.2
        if qos == "LSR":
            assert call.refused is not None
            assert len(call.refused[1].encode()) <= 500
            assert call.refused[1].isprintable()
        else:
            world.finish(call, "evil-1")
        await world.executor.ledger_writer.flush()
        check_little_is_said(world)
        assert world.on(honest) == "2-3"
        world.check()

    run_scenario(scenario)


def test_a_hostile_pod_is_adopted_after_a_restart_as_before(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        for number in range(20):
            uid = f"evil{number}"
            world.runtime.pods[uid] = RuntimePod(uid, uid, "ns", "evil", 0, True, {}, {STATUS: SPARSE})
            world.runtime.containers[uid] = RuntimeContainer(uid, uid, "c", 0, "RUNNING")
            world.cgroups.sets[uid] = CpuSet.parse("0-15")
        began = time.thread_time()
        await world.sync.once()
        assert time.thread_time() - began < 0.5, "0.4 s for each of them before sets were bounded"
        assert len(world.executor.state.containers) == 20
        check_little_is_said(world)

    run_scenario(scenario, reconciled=False)


def test_records_of_an_older_ledger_lose_ids_not_on_the_machine(run_scenario) -> None:
    wide = CpuSet(range(0, 65536, 2))
    pod = Pod("s-evil", "evil", "ns", "evil", 0, QosClass.LSR, cpuset=wide, cgroup_parent="/kubepods/podevil")
    borrower = Pod(
        "s-be", "be", "ns", "be", 0, QosClass.BE, cpuset=wide, nodes=Mask([0, 999]), volcano_nodes=Mask([77])
    )
    within = Placement(
        Pool.BE, CpuSet(), Mask([0]), ("x" * 400_000,), pool_cpus_limit=wide, pool_numa_limit=Mask([0, 999])
    )
    container = Container("be-1", "c", borrower, Request(), within, Phase.RUNNING)
    owner = changed_copy(container, id="own-1", placement=Placement(Pool.OWN, wide, Mask([0])), owner="be")
    entries = {
        "p/s-evil": dump(pod),
        "p/s-be": dump(borrower),
        "c/be-1": dump(container),
        "c/own-1": dump(owner),
    }

    async def scenario(world: Any) -> None:
        pods, containers = world.executor.state.pods, world.executor.state.containers
        assert pods["s-evil"].cpuset is None
        assert pods["s-evil"].problem.kind is DefectKind.CPU_LIST
        assert pods["s-evil"].problem in pods["s-evil"].defects
        assert (pods["s-be"].nodes, pods["s-be"].volcano_nodes) == (None, None)
        assert list(containers) == ["be-1"], "CPUs that no container can own are not a record of an owner"
        assert containers["be-1"].placement.pool_cpus_limit == CpuSet(range(0, 16, 2))
        assert containers["be-1"].placement.pool_numa_limit == Mask([0])
        assert longest(dump(containers["be-1"])) <= 2000
        assert any("c/own-1" in problem["what"] for problem in world.executor.telemetry.problems())
        assert longest(world.executor.telemetry.problems()) <= 2000

    run_scenario(scenario, reconciled=False, entries=entries)


def test_a_record_is_read_as_it_was_written_if_the_machine_has_its_ids() -> None:
    bounds = Bounds(CpuSet(range(8)), Mask([0, 1]))
    bad, worse = InputDefect("bad", DefectKind.POLICY), InputDefect("worse", decisive=True)
    pod = Pod(
        "s",
        "u",
        "ns",
        "p",
        cpuset=CpuSet([7]),
        nodes=Mask([1]),
        volcano_nodes=Mask([0]),
        defects=(bad, worse),
    )
    placement = Placement(
        Pool.BE, CpuSet(), Mask([0]), ("why",), pool_cpus_limit=CpuSet([7]), pool_numa_limit=Mask([1])
    )
    container = Container("c", "main", pod, Request(), placement, Phase.RUNNING)
    read = load_pod(dump(pod), bounds)
    assert read == pod
    assert read is not None
    assert [(each.kind, each.decisive) for each in read.defects] == [
        (DefectKind.POLICY, False),
        (DefectKind.ANNOTATION, True),
    ]
    assert load_container(dump(container), bounds) == container


def test_the_problem_of_an_older_record_is_the_decisive_defect() -> None:
    record = dump(Pod("s", "u", "ns", "p")) | {"problem": "annotation is not JSON"}
    read = load_pod(record)
    assert read is not None
    assert read.problem == "annotation is not JSON"
    assert load_pod(dump(read)) == read
    with_faults = record | {
        "faults": [["policy", "no such policy"], ["annotation", "annotation is not JSON"]]
    }
    read = load_pod(with_faults)
    assert read is not None
    assert [each.decisive for each in read.defects] == [False, True]
    assert dump(read) == with_faults


def test_messages_of_an_older_ledger_are_cut_and_can_be_encoded() -> None:
    faults = [["annotation", f"{i} \ud800 " + "x" * 400_000] for i in range(500)]
    record = {**dump(Pod("s", "u", "ns", "p")), "problem": faults[0][1], "faults": faults}
    pod = load_pod(record)
    assert pod is not None
    assert len(pod.problem) == 300
    assert pod.problem.startswith("0 \\ud800 xxx")
    assert len(json.dumps(dump(pod), ensure_ascii=False).encode()) < 10_000


def test_a_problem_is_no_longer_than_a_message() -> None:
    reported: list[str] = []
    port = telemetry(reported)
    for _ in range(2):
        port.problem("odd", value="\ud800\n" + "\u4e2d" * 10**6)
    (problem,) = port.problems()
    assert problem["count"] == 2
    assert len(reported) == 1
    assert 1900 < len(problem["what"].encode()) <= 2000
    assert longest(problem) <= 2000
    assert problem["what"].startswith('odd value="\\ud800\\n\u4e2d')


def test_history_keeps_messages_only() -> None:
    history = DecisionHistory()
    verdict, reasons = Verdict(3, "No", "\ud800" + "x" * 10**6), ("why", "y" * 10**6)
    history.note(1.0, Explanation("CreateContainer", "ns/p", "u", verdict=verdict, reasons=reasons))
    history.note(2.0, Explanation("CreateContainer", "ns/q", "v"), "id")
    history.amend("id", "z" * 10**6)
    history.refused("id", verdict)
    for ref in ("ns/p", "ns/q"):
        (record,) = history.find(ref)
        assert len(record.explanation.verdict.message) == 2000
        assert record.explanation.verdict.message.startswith("\\ud800xxx")
        assert len(record.explanation.reasons[-1]) == 2000
    assert history.find("ns/p")[0].explanation.reasons[0] == "why"


def test_refs_are_short_and_printable() -> None:
    pod = Pod("s", "u", "n" * 63, "p" * 253)
    container = Container("c", "c" * 63, pod, Request(), Placement(Pool.BE, CpuSet(), Mask()), Phase.RUNNING)
    assert container.ref == f"{'n' * 63}/{'p' * 253}/{'c' * 63}"
    odd = changed_copy(container, name="\ud800\n" * 10**6, pod=Pod("s", "u", "\u202e", "p" * 10**6))
    assert len(odd.ref) <= 400
    assert odd.ref.isprintable()
