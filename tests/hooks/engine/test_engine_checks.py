"""Checks of the answers that hooks may give at each point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.hooks.answers import CLEAR, FIELDS, LEAVE, MAPS, Adjustment, Update, Veto
from proxy.hooks.engine.checks import LONGEST_REASON, MOST_ENTRIES, checked_answer
from proxy.hooks.events import (
    POINTS,
    Point,
    PostCreateContainer,
    PreCreateContainer,
    PreRunPodSandbox,
    PreUpdateContainerResources,
    ValidateCreateContainer,
)
from proxy.hooks.facts import ContainerFacts, Decision, Device, Mount, PodFacts
from proxy.model.errors import HookError
from proxy.model.idset import CpuSet, Mask

POD = PodFacts(namespace="ns", name="pod")
DECISION = Decision(allowed=CpuSet([0, 1]), allowed_mems=Mask([0]))
CREATE = PreCreateContainer(POD, ContainerFacts(name="main"), DECISION)
UPDATE = PreUpdateContainerResources(POD, ContainerFacts(name="main", id="mine"), DECISION)
POST = PostCreateContainer(POD, ContainerFacts(name="main", id="mine"), DECISION)
RUN = PreRunPodSandbox(POD)


def refusal(answer: object, event: Point = CREATE) -> str:
    with pytest.raises(HookError) as caught:
        checked_answer(answer, event)
    return str(caught.value)


@pytest.mark.parametrize("answer", [1, "x", {}, True, object(), Adjustment, [Adjustment()]])
def test_only_an_adjustment_a_veto_or_nothing_is_an_answer(answer: object) -> None:
    assert "it must be an Adjustment, a Veto or None" in refusal(answer)


def test_a_coroutine_that_is_never_awaited_is_closed_and_refused() -> None:
    async def answer() -> None:
        return None

    assert "not coroutine" in refusal(answer())


def test_no_answer_is_no_change() -> None:
    assert checked_answer(None, CREATE) is None
    assert checked_answer(Adjustment(), CREATE) is None
    assert checked_answer(Adjustment(updates={"id": Update()}), CREATE) is None


def test_a_valid_answer_is_accepted_unchanged() -> None:
    good = Adjustment(
        cpus=CpuSet([1]),
        mems=Mask([0]),
        cpu_period=100_000,
        cpu_quota=-1,
        cpu_shares=2,
        memory_limit=1,
        memory_swap_limit=-1,
        oom_score_adj=0,
        unified={"memory.high": "max", "io.weight": CLEAR},
        annotations={"a/b": "", "c": CLEAR},
        labels={"l": "ü"},
        envs={"A": "b=c", "B": "\udcff", "C": CLEAR},
        devices={"/dev/x": Device("/dev/x", "/dev/y", "rwm"), "/dev/z": CLEAR},
        mounts={"/a": Mount("/a", "/b", True, "bidirectional")},
        updates={"other": Update(cpus=CpuSet([7]), cpu_quota=CLEAR, unified={"memory.low": "1"})},
    )
    reported: Any = checked_answer(good, CREATE)
    assert Adjustment(**reported) == good


@pytest.mark.parametrize("field", sorted(set(FIELDS) - MAPS - {"cgroup_parent"}))
def test_each_value_can_be_cleared(field: str) -> None:
    clear: Any = {field: CLEAR}
    assert checked_answer(Adjustment(**clear), CREATE) == clear


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("cpus", [CpuSet(), CpuSet([2]), CpuSet([0, 2]), Mask([0]), "0", 0, {0}, {}, None]),
        ("mems", [Mask(), Mask([1]), CpuSet([0]), "0", 0]),
        ("cpu_period", [999, 1_000_001, 0, 1000.0, "1000", True, None]),
        ("cpu_quota", [0, 999, -2, 2**63, False]),
        ("cpu_shares", [0, 1, 262_145, -1, True]),
        ("memory_limit", [0, -1, 2**63, "1G"]),
        ("memory_swap_limit", [0, -2]),
        ("oom_score_adj", [-1001, 1001, 0.0]),
        ("envs", [["A"], 1, "A=B", None, CLEAR]),
        ("unified", [{"memory.high": 1}, {"memory.high": None}]),
    ],
)
def test_an_invalid_value_is_refused_with_field_and_container(field: str, values: list[Any]) -> None:
    for value in values:
        message = refusal(Adjustment(**{field: value}))
        assert field in message
        assert "ns/pod/main" in message


def test_the_refusal_names_the_value_and_the_allowed_ones() -> None:
    message = refusal(Adjustment(cpus=CpuSet([3])))
    assert message == "cannot set cpus of ns/pod/main to 3: a hook may choose from 0-1 there"


@pytest.mark.parametrize(
    ("field", "key", "value"),
    [
        ("envs", "", "x"),
        ("envs", "A=B", "x"),
        ("envs", "A\0", "x"),
        ("envs", "A", "x\0"),
        ("envs", "A", b"x"),
        ("envs", 1, "x"),
        ("envs", "A", "x" * 65537),
        ("envs", "A" * 4097, "x"),
        ("envs", "\ud800", "x"),
        ("annotations", "", "x"),
        ("annotations", "a", "\udcff"),
        ("labels", "a", 1),
        ("labels", "\udcff", "x"),
        ("unified", "cpuset.cpus", "0"),
        ("unified", "cgroup.procs", "1"),
        ("unified", "../memory.high", "1"),
        ("unified", "a/memory.high", "1"),
        ("unified", "memory", "1"),
        ("devices", "dev/x", Device("dev/x", "/dev/x")),
        ("devices", "/dev/x", Device("/dev/y", "/dev/x")),
        ("devices", "/dev/x", Device("/dev/x", "/dev/x", "")),
        ("devices", "/dev/x", Device("/dev/x", "/dev/x", "x")),
        ("devices", "/dev/x", Mount("/dev/x", "/dev/x")),
        ("mounts", "/", Mount("/", "/x")),
        ("mounts", "/a/../b", Mount("/a/../b", "/x")),
        ("mounts", "/./", Mount("/./", "/x")),
        ("labels", "io.kubernetes.pod.uid", "x"),
        ("labels", "io.kubernetes.container.name", CLEAR),
        ("annotations", "io.kubernetes.container.hash", "x"),
        ("annotations", "io.kubernetes.pod.terminationGracePeriod", CLEAR),
        ("mounts", "/a", Mount("/a", "x")),
        ("mounts", "/a", Mount("/a", "/x", propagation="slave")),
        ("mounts", "/a", Mount("/a", "/x", readonly=1)),  # type: ignore[arg-type]
        ("updates", "", Update(cpu_shares=2)),
        ("updates", "id", Adjustment(cpu_shares=2)),
        ("updates", "id", CLEAR),
        ("updates", "id", Update(cpus=CpuSet())),
        ("updates", "id", Update(cpu_shares=1)),
        ("updates", "id", Update(unified={"cpuset.cpus": "1"})),
        ("updates", "id", Update(unified={"memory.high": CLEAR})),  # type: ignore[dict-item]
        ("updates", "id", Update(unified=1)),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_entry_is_refused_with_its_key_only(field: str, key: Any, value: Any) -> None:
    values: Any = {field: {key: value}}
    message = refusal(Adjustment(**values))
    assert message.startswith(f"cannot set {field}[")
    assert "xxx" not in message


def test_keys_of_kubelet_may_only_be_repeated_and_others_are_free() -> None:
    keys = {"io.kubernetes.pod.uid": "u"}
    mine = {"io.kubernetes.container.hash": "h"}
    pod = PodFacts(namespace="ns", name="pod", labels=keys, annotations=mine)
    container = ContainerFacts(name="main", id="c", labels=keys, annotations=mine)
    echo = Adjustment(labels=keys, annotations=mine)
    assert checked_answer(echo, PreCreateContainer(POD, container, DECISION)) == {
        "labels": keys,
        "annotations": mine,
    }
    assert checked_answer(echo, PreRunPodSandbox(pod)) is not None
    assert "kubelet" in refusal(echo, PreCreateContainer(pod, ContainerFacts(name="main"), DECISION))
    event_with_annotations = PreUpdateContainerResources(
        POD, ContainerFacts(name="main"), DECISION, asked_annotations=mine
    )
    assert checked_answer(Adjustment(annotations=mine), event_with_annotations) == {"annotations": mine}
    free = {"io.kubernetes.cri-o.ShmSize": "1", "kubernetes.io/config.source": "x"}
    assert checked_answer(Adjustment(annotations=free), RUN) == {"annotations": free}


def test_a_path_is_normalized_and_accepted_once() -> None:
    reported: Any = checked_answer(Adjustment(mounts={"//a/./b/": Mount("/a/b", "/x")}), CREATE)
    assert reported["mounts"] == {"/a/b": Mount("/a/b", "/x")}
    twice: Any = {"/dev/x": Device("/dev/x", "/dev/x"), "/dev/x/": CLEAR}
    assert "twice" in refusal(Adjustment(devices=twice))


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_field_that_a_point_does_not_accept_is_refused(field: str) -> None:
    value: Any = {"/a": CLEAR} if field in MAPS else CLEAR
    values: Any = {field: value}
    for event in (CREATE, UPDATE, POST, RUN):
        if field not in event.TAKES:
            reported = refusal(Adjustment(**values), event)
            *_, where = reported.partition(f"that cannot be changed at {event.NAME}, but at ")
            assert where.split(" and ") == [name for name in POINTS if field in POINTS[name].TAKES]


def test_a_cgroup_parent_is_a_path_or_a_slice() -> None:
    for good in ("/kubepods/pod1", "kubepods-pod1.slice", CLEAR):
        assert checked_answer(Adjustment(cgroup_parent=good), RUN) == {"cgroup_parent": good}
    for bad in ("", "/", "a/../b", "a\0"):
        refusal(Adjustment(cgroup_parent=bad), RUN)


def test_an_update_of_the_calls_own_container_is_refused() -> None:
    mine = Adjustment(updates={"mine": Update(cpu_shares=2)})
    assert "set it in the adjustment" in refusal(mine, UPDATE)
    assert checked_answer(mine, POST) is not None


def test_a_veto_is_taken_only_if_a_call_can_be_refused() -> None:
    assert checked_answer(Veto("no\n room"), CREATE) == Veto("no room")
    assert checked_answer(Veto(""), CREATE) == Veto("no reason given")
    assert checked_answer(Veto("x" * 5000), CREATE) == Veto("x" * LONGEST_REASON)
    assert checked_answer(Veto("no"), ValidateCreateContainer(CREATE)) == Veto("no")
    refusal(Veto("no"), POST)
    refusal(Veto(1))  # type: ignore[arg-type]


def test_the_size_of_an_answer_is_limited() -> None:
    many = {f"A{i}": "x" for i in range(MOST_ENTRIES)}
    assert checked_answer(Adjustment(envs=many), CREATE) is not None
    assert f"at most {MOST_ENTRIES}" in refusal(Adjustment(envs=many | {"B": "x"}))
    large = {f"A{i}": "x" * 65536 for i in range(3)}
    assert checked_answer(Adjustment(envs=large), CREATE) is not None
    assert "at most 262144 are allowed" in refusal(Adjustment(envs=large, annotations=large))
    files = {"id": Update(unified={f"a.b{i}": "x" * 65536 for i in range(5)})}
    assert "at most 262144 are allowed" in refusal(Adjustment(updates=files))


class Endless(Mapping[str, str]):
    """A map that never ends, with another value at each read."""

    reads = 0

    def __getitem__(self, key: str) -> str:
        self.reads += 1
        return str(self.reads)

    def __iter__(self) -> Iterator[str]:
        number = 0
        while True:
            number += 1
            yield str(number)

    def __len__(self) -> int:
        return 1


def test_custom_maps_are_read_once_and_not_for_ever() -> None:
    assert "at most" in refusal(Adjustment(envs=Endless()))


def test_an_accepted_answer_has_plain_types() -> None:
    class Number(IntEnum):
        FEW = 2

    class Text(str):
        __slots__ = ()

    reported: Any = checked_answer(Adjustment(cpu_shares=Number.FEW, envs={Text("A"): Text("b")}), CREATE)
    assert type(reported["cpu_shares"]) is int
    assert [(type(key), type(value)) for key, value in reported["envs"].items()] == [(str, str)]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.binary(max_size=3) | st.just(CLEAR)
    | st.just(LEAVE) | st.builds(CpuSet, st.sets(st.integers(0, 3)))
    | st.builds(Mask, st.sets(st.integers(0, 3))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    | st.builds(Device, inner, inner, inner) | st.builds(Mount, inner, inner, inner, inner)
    | st.builds(Update, cpus=inner, cpu_quota=inner, unified=inner),
    max_leaves=6,
)  # fmt: skip


@given(
    st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=4),
    st.sampled_from([CREATE, UPDATE, POST, RUN]),
)
def test_whatever_is_answered_is_taken_or_refused_in_words(values: dict[str, Any], event: Point) -> None:
    try:
        reported: Any = checked_answer(Adjustment(**values), event)
    except HookError:
        return
    assert reported is None or reported.keys() <= event.TAKES
    # An accepted answer is accepted again, unchanged.
    assert checked_answer(Adjustment(**(reported or {})), event) == reported
