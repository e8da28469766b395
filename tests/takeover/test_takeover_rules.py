"""The steps as rules: their conflicts, the record after each, and the content of kubelet's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from proxy.allocation.cpu_topology import CpuTopology
from proxy.backends.kubelet.checkpoint_writer import none_state, pod_level_cpus, static_state
from proxy.backends.kubelet.checkpoints import (
    CheckpointError,
    cpu_checksum_text,
    fnv1a,
    held_cpus,
    read_cpu_checkpoint,
)
from proxy.backends.kubelet.cpu_manager import CONFIGZ
from proxy.engine.enforcement_state import APPLIED_TO_ALL, Enforcement
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet
from proxy.model.kubelet import CpuManager, Held
from proxy.model.mode import NodeMode
from proxy.model.pod_selection import PodSelection
from proxy.takeover.inputs import (
    CpuManagerFile,
    NotAppliedToAll,
    OwningContainer,
    TakeoverInputs,
    not_applied_reason,
)
from proxy.takeover.kubelet_start import kubelet_settings
from proxy.takeover.record import TakeoverRecord, TakeoverStage, completed
from proxy.takeover.rules import (
    NOT_APPLIED,
    StepRefusedError,
    conflicts,
    finish,
    kubelet_state_text,
    remaining_allocations,
    revert,
    start,
)
from proxy.takeover.status_data import (
    after_revert,
    allocations,
    next_steps,
    notes,
    plan_page,
    status_page,
)
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

EIGHT = CpuSet(range(8))
HELD = {"a": {"x": CpuSet([2, 3])}, "b": {"y": CpuSet([4])}}
OWNING = (
    OwningContainer("a", "x", "ns/a/x", CpuSet([2, 3])),
    OwningContainer("b", "y", "ns/b/y", CpuSet([4])),
)
PODS = {"a": "ns/a", "b": "ns/b"}


def inputs(held: Held | None = None, **more: Any) -> TakeoverInputs:
    text = static_state(EIGHT, HELD if held is None else held)
    values: dict[str, Any] = {
        "file": CpuManagerFile.of(text),
        "manager": CpuManager("static", reserved=CpuSet([0])),
        "owning": OWNING,
        "pods": PODS,
        "online": EIGHT,
        "shareable": EIGHT,
        **more,
    }
    return TakeoverInputs(Path("/k"), **values)


def begun(found: TakeoverInputs | None = None) -> TakeoverRecord:
    return start(TakeoverRecord(), found or inputs(), 5.0).record


def odd_file(**fields: object) -> CpuManagerFile:
    """Return a file whose sets contradict each other, with the checksum that kubelet would write."""
    raw: dict[str, Any] = {"policyName": "static", "defaultCpuSet": "0-1,5-7", **fields}
    lower = {key.lower(): value for key, value in raw.items()}
    return CpuManagerFile.of(json.dumps({**raw, "checksum": fnv1a(cpu_checksum_text(lower, 2))}))


def sets(text: str) -> dict[str, dict[str, str]]:
    found = read_cpu_checkpoint(text)
    assert found.version is not None
    return {uid: {n: str(c) for n, c in pod.items()} for uid, pod in held_cpus(found).held.items()}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"not_applied": NotAppliedToAll.OBSERVE}, "the mode is observe"),
        ({"not_applied": NotAppliedToAll.SELECTION}, "mode enforce selects only a part of the pods"),
        ({"not_applied": NotAppliedToAll.LAGGING}, "still to be changed (topoproxy enforce status)"),
        ({"not_applied": NotAppliedToAll.RELEASED}, "the node is released"),
        ({"ready": False}, "has not compared its state with the runtime"),
        ({"file": CpuManagerFile.of(None)}, "cannot be used: it does not exist"),
        ({"file": CpuManagerFile.of("{}")}, "its checksum is wrong"),
        ({"file": CpuManagerFile.of("{")}, "cannot read kubelet's cpu_manager_state"),
        ({"file": CpuManagerFile.of(none_state())}, "policy is none: it holds no CPUs"),
        ({"file": CpuManagerFile.of(static_state(EIGHT, {"": {"id": CpuSet([2])}}, version=1))}, "version 1"),
        ({"online": CpuSet(range(4))}, "CPUs 4 that kubelet gave to ns/b/y are not online"),
        ({"shareable": CpuSet([2, 3, 4])}, "the shared pool would be empty"),
        (
            {"owning": (OwningContainer("c", "z", "ns/c/z", CpuSet([3, 6])),)},
            "ns/c/z owns CPU 3 that kubelet gave to ns/a/x",
        ),
        (
            {"file": odd_file(entries={"a": {"x": "2-3"}, "b": {"y": "3-4"}})},
            "kubelet gave CPUs 3 to ns/a/x and to ns/b/y",
        ),
        (
            {"file": odd_file(entries={"a": {"x": "1-2"}})},
            "CPUs 1 that kubelet gave to ns/a/x are in its default",
        ),
    ],
)
def test_conflicts_of_a_start(more: dict[str, Any], message: str) -> None:
    found = inputs(**more)
    assert any(message in why for why in conflicts(found)), conflicts(found)
    with pytest.raises(StepRefusedError, match="cannot start the takeover"):
        start(TakeoverRecord(), found, 5.0)
    assert plan_page(TakeoverRecord(), found)["can_start"] is False


@pytest.mark.parametrize(
    ("mode", "enforcement", "why"),
    [
        (NodeMode.ENFORCE, APPLIED_TO_ALL, None),
        (NodeMode.ENFORCE, Enforcement(paused=True), None),
        (NodeMode.OBSERVE, APPLIED_TO_ALL, NotAppliedToAll.OBSERVE),
        (NodeMode.OBSERVE, Enforcement(lagging=frozenset({"a"})), NotAppliedToAll.OBSERVE),
        (NodeMode.ENFORCE, Enforcement(PodSelection(percent=50)), NotAppliedToAll.SELECTION),
        (NodeMode.ENFORCE, Enforcement(lagging=frozenset({"a"})), NotAppliedToAll.LAGGING),
        (NodeMode.RELEASING, APPLIED_TO_ALL, NotAppliedToAll.RELEASED),
        (NodeMode.RELEASED, Enforcement(PodSelection(percent=50)), NotAppliedToAll.RELEASED),
    ],
)
def test_why_the_plan_is_not_applied_to_all_pods(
    mode: NodeMode, enforcement: Enforcement, why: NotAppliedToAll | None
) -> None:
    machine = regular_machine(1, 1, 4, 2)
    empty = NodeState.empty(Node(machine, CpuTopology.of(machine)))
    assert not_applied_reason(structs.replace(empty, mode=mode, enforcement=enforcement)) is why
    assert why is None or why in NOT_APPLIED


def test_states_that_do_not_conflict_with_a_start() -> None:
    assert conflicts(inputs()) == ()
    elsewhere = (OwningContainer("c", "z", "ns/c/z", CpuSet([3])),)
    assert conflicts(inputs(owning=elsewhere, decided_elsewhere=frozenset("a"))) == ()
    assert conflicts(inputs(manager=CpuManager("none"))) == (), (
        "the configuration may have been changed already"
    )


def test_a_start_records_kubelets_allocations_once() -> None:
    outcome = start(
        TakeoverRecord(),
        inputs(manager=CpuManager("static", {"strict-cpu-reservation": "true"}, CpuSet([0]))),
        5.0,
    )
    record = outcome.record
    assert (record.stage, record.began, record.since, record.policy) == (
        TakeoverStage.STARTED,
        5.0,
        5.0,
        "static",
    )
    assert (record.reserved, record.strict, record.old) == (CpuSet([0]), True, HELD)
    assert outcome.reported[0].startswith("2 allocations")
    assert start(record, inputs(), 6.0).record == record


def test_a_finish_needs_a_start_a_stopped_kubelet_and_no_old_pods() -> None:
    with pytest.raises(StepRefusedError, match="it has not started"):
        finish(TakeoverRecord(), inputs(), "none", with_running=True, force=True)
    with pytest.raises(
        StepRefusedError, match=r"2 of kubelet's allocations are still in use \(ns/a/x, ns/b/y\)"
    ):
        finish(begun(), inputs(), "none", with_running=False, force=True)
    with pytest.raises(StepRefusedError, match=r"kubelet runs \(sign\)"):
        finish(begun(), inputs(running=("sign",)), "none", with_running=True, force=False)
    with pytest.raises(StepRefusedError, match="read-only") as caught:
        finish(begun(), inputs(unwritable="/k is read-only"), "none", with_running=True, force=True)
    assert "ReadWritePaths=/k" in caught.value.hints[0]
    done = finish(begun(), inputs(pods={}, owning=()), "none", with_running=False, force=False)
    assert done.record.pending is not None
    assert done.record.pending.after == none_state()
    forced = finish(begun(), inputs(running=("sign",)), "none", with_running=True, force=True)
    assert forced.record.pending is not None
    assert forced.record.pending.before == inputs().file.text


def test_a_finish_for_static_writes_the_cpus_in_effect() -> None:
    new = OwningContainer("c", "z", "ns/c/z", CpuSet([6]))
    found = inputs({**HELD, "c": {"z": CpuSet([5])}}, owning=(*OWNING, new))
    done = finish(begun(), found, "static", with_running=True, force=False)
    assert done.record.pending is not None
    assert sets(done.record.pending.after) == {"a": {"x": "2-3"}, "b": {"y": "4"}, "c": {"z": "6"}}


def test_a_repeated_finish_does_nothing() -> None:
    record = changed_copy(begun(), stage=TakeoverStage.FINISHED, target="none", written=none_state())
    there = inputs(file=CpuManagerFile.of(none_state()), running=("sign",))
    assert finish(record, there, "none", with_running=False, force=False).record == record
    with pytest.raises(StepRefusedError):
        finish(record, inputs(running=("sign",)), "none", with_running=False, force=False)
    again = finish(record, inputs(), "none", with_running=False, force=False)
    assert again.record.pending is not None
    other = finish(record, changed_copy(there, running=()), "static", with_running=False, force=False)
    assert other.record.pending is not None
    assert other.record.pending.target == "static"


def test_a_revert_needs_a_stopped_kubelet_and_writes_the_new_owners() -> None:
    assert revert(TakeoverRecord(), inputs(), force=False).record == TakeoverRecord()
    assert revert(begun(), inputs(running=("sign",)), force=False).record == TakeoverRecord()
    new = (*OWNING, OwningContainer("c", "z", "ns/c/z", CpuSet([6])))
    with pytest.raises(StepRefusedError, match="cannot revert the takeover: kubelet runs"):
        revert(begun(), inputs(running=("sign",), owning=new), force=False)
    done = revert(begun(), inputs(owning=new), force=False)
    assert done.record.pending is not None
    assert sets(done.record.pending.after)["c"] == {"z": "6"}


def test_a_revert_does_not_trust_a_file_that_kubelet_never_read() -> None:
    running = inputs(running=("sign",))
    forced = finish(begun(), running, "static", with_running=True, force=True).record
    record = changed_copy(
        forced, stage=TakeoverStage.FINISHED, written=inputs().file.text or "", target="static", pending=None
    )
    with pytest.raises(StepRefusedError, match="kubelet runs"):
        revert(record, running, force=False)
    assert revert(record, inputs(), force=False).record == TakeoverRecord()
    assert revert(changed_copy(record, forced=False), running, force=False).record == TakeoverRecord()
    record = changed_copy(record, forced_signs=("process 1 is kubelet",))
    restarted = changed_copy(running, running=("process 2 is kubelet",))
    assert revert(record, restarted, force=False).record == TakeoverRecord()


MUST_SAY = "kubelet's configuration must say cpuManagerPolicy: {} before kubelet starts"
RESTART = "systemctl restart kubelet"


def forced_finish(target: str, signs: tuple[str, ...] = ("process 7 is kubelet",)) -> TakeoverRecord:
    found = inputs(running=signs)
    return completed(finish(begun(), found, target, with_running=True, force=True).record, 6.0)


@pytest.mark.parametrize("source", [CONFIGZ, "/k/config.yaml", "kubelet's default, /k/config.yaml does not"])
def test_a_kubelet_that_runs_under_another_policy_than_its_file_must_be_restarted(source: str) -> None:
    record = changed_copy(forced_finish("none"), forced=False)
    manager = CpuManager("static", sources={"policy": source})
    found = inputs(file=CpuManagerFile.of(record.written), manager=manager, running=("a sign",))
    assert next_steps(record, found) == [MUST_SAY.format("none"), RESTART]
    assert after_revert(record, found, forced=False) == []
    none = changed_copy(found, manager=CpuManager("none", sources={"policy": source}))
    assert after_revert(record, none, forced=False) == [MUST_SAY.format("static"), RESTART]
    assert next_steps(record, none) == ["write cpuManagerPolicy: static into topoproxy's configuration"]


def test_a_policy_that_only_the_state_file_names_says_nothing_about_the_running_kubelet() -> None:
    record = changed_copy(forced_finish("none"), forced=False)
    manager = CpuManager("static", sources={"policy": "/k/cpu_manager_state"})
    found = inputs(
        file=CpuManagerFile.of(record.written), manager=manager, running=("a sign",), configured="static"
    )
    assert next_steps(record, found) == []
    assert next_steps(record, changed_copy(found, manager=CpuManager())) == []
    assert after_revert(record, changed_copy(found, manager=CpuManager()), forced=False) == []


@pytest.mark.parametrize("target", ["none", "static"])
def test_a_kubelet_that_ran_while_its_file_was_written_must_be_restarted(target: str) -> None:
    record = forced_finish(target)
    manager = CpuManager(target, sources={"policy": CONFIGZ})
    found = inputs(
        file=CpuManagerFile.of(record.written),
        manager=manager,
        running=record.forced_signs,
        configured="static",
    )
    assert next_steps(record, found) == [RESTART]
    assert next_steps(record, changed_copy(found, running=("process 8 is kubelet", "a sign"))) == []
    assert next_steps(record, changed_copy(found, running=("a sign",))) == [RESTART], "it may be the same one"
    former = changed_copy(record, forced_signs=())
    assert next_steps(former, found) == [RESTART]
    static = changed_copy(found, manager=CpuManager("static", sources={"policy": CONFIGZ}))
    assert after_revert(record, static, forced=True) == [RESTART]


def test_the_file_keeps_other_entries_of_kubelet_that_do_not_overlap() -> None:
    coming = {"a": {"x": CpuSet([2, 3])}, "new": {"n": CpuSet([5])}, "lost": {"l": CpuSet([6])}}
    found = inputs(coming, owning=(OWNING[0], OwningContainer("c", "z", "ns/c/z", CpuSet([6]))))
    assert sets(kubelet_state_text(begun(), found, "static").text) == {
        "a": {"x": "2-3"},
        "new": {"n": "5"},
        "c": {"z": "6"},
    }
    init = {"a": {"init": CpuSet([2]), "x": CpuSet([2, 3])}}
    assert sets(kubelet_state_text(begun(), inputs(init), "static").text)["a"] == {"init": "2", "x": "2-3"}


def test_the_file_leaves_a_cpu_for_containers_without_own_cpus() -> None:
    file = CpuManagerFile.of(static_state(EIGHT, {"new": {"n": CpuSet([6, 7])}}))
    owning = (OwningContainer("a", "x", "ns/a/x", CpuSet([1, 2, 3, 4, 5])),)
    none_kept = inputs(file=file, owning=owning, manager=CpuManager("static"))
    assert "new" in sets(kubelet_state_text(TakeoverRecord(), none_kept, "static").text), "CPU 0 is left"
    owning = (OwningContainer("a", "x", "ns/a/x", CpuSet([0, 1, 2, 3, 4, 5])),)
    assert "new" not in sets(
        kubelet_state_text(
            TakeoverRecord(), inputs(file=file, owning=owning, manager=CpuManager()), "static"
        ).text
    )


def test_owners_that_the_file_cannot_describe_are_skipped_and_reported() -> None:
    owning = (
        OwningContainer("a", "x", "ns/a/x", CpuSet([0, 1])),
        OwningContainer("b", "y", "ns/b/y", CpuSet([9])),
    )
    made = kubelet_state_text(begun(), inputs({}, owning=owning), "static")
    assert sets(made.text) == {}
    assert made.omitted == (
        "ns/a/x has CPUs 0-1: CPUs 0 are reserved by kubelet",
        "ns/b/y has CPUs 9: none of them is online",
    )
    messages = revert(begun(), inputs(HELD, owning=owning), force=False).reported
    assert any("ns/a/x has CPUs 0-1" in message for message in messages)


def test_a_strict_reserve_is_remembered_if_kubelet_does_not_report_it() -> None:
    record = changed_copy(begun(), strict=True)
    text = kubelet_state_text(record, inputs(manager=CpuManager()), "static").text
    assert held_cpus(read_cpu_checkpoint(text)).default == CpuSet([1, 5, 6, 7])


def test_a_kubelet_starts_again_after_a_revert_as_its_steps_say(played: Any) -> None:
    """The options that had to be removed for policy none are needed again for the file of policy static."""
    options = {"strict-cpu-reservation": "true", "full-pcpus-only": "true"}
    played.directory.mkdir()
    played.path.write_text(static_state(EIGHT, HELD, reserved=played.reserved, strict=True))
    played.start("static", options)
    static = inputs(
        file=CpuManagerFile.of(played.path.read_text()),
        manager=CpuManager("static", options, played.reserved),
    )
    finished = finish(begun(static), static, "none", with_running=True, force=False)
    assert finished.record.pending is not None
    played.path.write_text(finished.record.pending.after)
    played.start("none")
    record = completed(finished.record, 6.0)
    none = inputs(
        file=CpuManagerFile.of(played.path.read_text()),
        manager=CpuManager("none", reserved=played.reserved),
    )
    reverted = revert(record, none, force=False)
    assert reverted.record.pending is not None
    played.path.write_text(reverted.record.pending.after)
    assert after_revert(record, none, forced=False) == [
        "kubelet's configuration must say cpuManagerPolicy: static before kubelet starts",
        (
            'cpuManagerPolicyOptions: {full-pcpus-only: "true", strict-cpu-reservation: "true"}'
            " must be set again before kubelet starts:"
            " without strict-cpu-reservation it refuses its state file"
        ),
        "systemctl start kubelet",
    ]
    with pytest.raises(played.crash_loop):
        played.start("static", {"full-pcpus-only": "true"})
    played.start("static", options)


def test_options_that_kubelet_has_need_not_be_set_again() -> None:
    manager = CpuManager("static", {"full-pcpus-only": "true", "strict-cpu-reservation": "1"}, CpuSet([0]))
    record = begun(inputs(manager=manager))
    assert kubelet_settings(record, inputs(manager=manager), "static") == ()
    partly = CpuManager("static", {"strict-cpu-reservation": "false"}, CpuSet([0]))
    assert kubelet_settings(record, inputs(manager=partly), "static") == (
        'cpuManagerPolicyOptions: {full-pcpus-only: "true"} must be set again before kubelet starts',
    )
    text = kubelet_state_text(record, inputs(manager=partly), "static").text
    assert held_cpus(read_cpu_checkpoint(text)).default >= CpuSet([0]), (
        "the value that kubelet has now counts"
    )
    text = kubelet_state_text(record, inputs(manager=CpuManager("static")), "static").text
    assert held_cpus(read_cpu_checkpoint(text)).default.isdisjoint(CpuSet([0])), "1 is true for kubelet too"


def test_options_that_were_set_after_the_start_are_recorded_too() -> None:
    changed = inputs(manager=CpuManager("static", {"full-pcpus-only": "true"}))
    record = finish(begun(), changed, "none", with_running=True, force=False).record
    assert record.options == {"full-pcpus-only": "true"}


def test_version_3_keeps_assignments_to_whole_pods_that_still_hold() -> None:
    pods = {"a": CpuSet([2, 3, 5]), "b": CpuSet([4, 6]), "gone": CpuSet([7])}
    file = CpuManagerFile.of(static_state(EIGHT, HELD, pods=pods, version=3))
    assert (file.version, file.policy) == (3, "static")
    made = kubelet_state_text(begun(), inputs(file=file), "static")
    assert pod_level_cpus(read_cpu_checkpoint(made.text)) == {"a": CpuSet([2, 3, 5]), "b": CpuSet([4, 6])}
    moved = (OWNING[0], OwningContainer("b", "y", "ns/b/y", CpuSet([5])))
    assert (
        pod_level_cpus(
            read_cpu_checkpoint(kubelet_state_text(begun(), inputs(file=file, owning=moved), "static").text)
        )
        == {}
    )
    assert read_cpu_checkpoint(kubelet_state_text(begun(), inputs(file=file), "none").text).version == 3


def test_a_file_by_container_ids_is_not_written() -> None:
    file = CpuManagerFile.of(static_state(EIGHT, {"": {"id": CpuSet([2])}}, version=1))
    with pytest.raises(CheckpointError, match=r"before 1\.18"):
        kubelet_state_text(begun(), inputs(file=file), "static")


def test_a_revert_without_a_readable_file_writes_the_owners() -> None:
    done = revert(begun(), inputs(file=CpuManagerFile.of("{")), force=False)
    assert done.record.pending is not None
    assert sets(done.record.pending.after) == {"a": {"x": "2-3"}, "b": {"y": "4"}}


def test_settings_to_change() -> None:
    manager = CpuManager("static", {"full-pcpus-only": "true"}, CpuSet([0]), "restricted")
    text = " ".join(kubelet_settings(begun(), inputs(manager=manager), "none"))
    for expected in (
        "cpuManagerPolicy: none",
        "(full-pcpus-only) must be removed",
        "reservedSystemCPUs: 0 may stay",
    ):
        assert expected in text
    assert "topologyManagerPolicy: restricted may stay, but without CPU hints" in text
    assert kubelet_settings(begun(), inputs(manager=CpuManager("static")), "static") == ()
    from_file = CpuManager("static", sources={"policy": "/k/cpu_manager_state"})
    assert (
        "must say cpuManagerPolicy: static"
        in kubelet_settings(begun(), inputs(manager=from_file), "static")[0]
    )


def test_pages_and_next_steps_follow_the_record() -> None:
    found = inputs(
        running=("sign",),
        static_pods=frozenset("a"),
        memory_policy="Static",
        unwritable="read-only",
        pods={"a": "ns/a"},
    )
    rows = allocations(TakeoverRecord(), found)
    assert [(row["container"], row["state"], row["from_file"]) for row in rows] == [
        ("ns/a/x", "runs", True),
        ("ns/b/y", "runs", False),
    ]
    gone = allocations(TakeoverRecord(), inputs(owning=(), pods={"a": "ns/a"}))
    assert [(row["container"], row["state"]) for row in gone] == [("ns/a/x", "waits"), ("pod b/y", "gone")]
    page_notes = " ".join(notes(TakeoverRecord(), found))
    for part in (
        "static pods keep their uid",
        "memory manager is Static",
        "could not write kubelet's state file: read-only",
    ):
        assert part in page_notes
    record = begun()
    assert [each.ref for each in remaining_allocations(record, found)] == ["ns/a/x"]
    status = status_page(record, found)
    assert (status["stage"], status["old"], len(status["left"])) == ("started", 2, 1)  # type: ignore[arg-type]
    assert "systemctl stop kubelet" in next_steps(record, found)
    finished = changed_copy(record, stage=TakeoverStage.FINISHED, target="none", written=none_state())
    there = inputs(file=CpuManagerFile.of(none_state()), configured="static", manager=CpuManager("none"))
    assert next_steps(finished, there)[-1] == "systemctl start kubelet"
    assert next_steps(finished, changed_copy(there, running=("sign",))) == []
    assert next_steps(finished, inputs())[-1] == "topoproxy takeover finish --kubelet-policy none"
    assert any("another program wrote it" in note for note in notes(finished, inputs()))
    assert next_steps(TakeoverRecord(), inputs(ready=False)) == ["remove the obstacles"]
