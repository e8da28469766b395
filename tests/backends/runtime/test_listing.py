"""The runtime's lists, entry by entry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.api.cri import api_pb2 as pb
from proxy.backends.runtime.listing import entries_of, read_container, read_sandbox
from proxy.executor.runtime_ports import RuntimeContainer
from proxy.model.errors import RuntimeCallError
from proxy.pools.facts import QOS_LABEL
from proxy.wire.protobuf import field

DEEP = b"\x9b\x06" * 200 + b"\x9c\x06" * 200
GOOD = field(1, b"good") + field(2, b"s") + field(3, field(1, b"main") + b"\x10\x02") + b"\x30\x01"
ENTRY = RuntimeContainer("good", "s", "main", 2, "RUNNING")


@pytest.mark.parametrize(
    ("entry", "unread", "words"),
    [
        (field(1, b"deep") + DEEP, {"deep"}, "cannot read container 'deep' of the runtime's list"),
        (DEEP, {""}, "cannot read container '' of the runtime's list"),
        (field(2, b"s") + field(1, b"late") + DEEP, {""}, "cannot read container ''"),
        (field(1, b"\xff\xfe") + field(2, b"s"), set(), "cannot use a container of the runtime's list"),
        (b"\x0a\x7fshort", {""}, "cannot read container ''"),
    ],
    ids=["deep", "deep without an id", "id not first", "id not UTF-8", "cut"],
)
def test_one_entry_costs_only_itself(entry: bytes, unread: set[str], words: str) -> None:
    reported: list[str] = []
    raw = field(1, entry) + field(1, GOOD) + field(1, entry)
    found = entries_of(raw, "container", read_container, reported.append)
    assert (list(found), found.unread) == ([ENTRY], unread)
    assert len(reported) == 2
    assert all(each.startswith(words) for each in reported)


def test_a_list_that_cannot_be_split_is_a_failed_call() -> None:
    with pytest.raises(RuntimeCallError, match="cannot read the runtime's list of container entries"):
        entries_of(field(1, GOOD) + b"\x0a\x7f", "container", read_container, lambda what: None)


def test_names_that_are_not_utf8_stay_apart() -> None:
    """Replaced by one character for all, two pods would have one uid."""
    pods = [
        field(1, b"s%d" % n) + field(2, field(2, b"uid-" + odd)) for n, odd in enumerate((b"\xff", b"\xfe"))
    ]
    raw = b"".join(field(1, pod) for pod in pods)
    assert [p.uid for p in entries_of(raw, "sandbox", read_sandbox, lambda what: None)] == [
        r"uid-\xff",
        r"uid-\xfe",
    ]


@given(st.dictionaries(st.sampled_from([QOS_LABEL, "app", "x/y"]), st.text(max_size=5)), st.booleans())
def test_a_sandbox_is_what_the_whole_message_says(labels: dict[str, str], ready: bool) -> None:
    item = pb.PodSandbox(
        id="s",
        metadata=pb.PodSandboxMetadata(name="n", uid="u", namespace="ns", attempt=3),
        state=pb.SANDBOX_READY if ready else pb.SANDBOX_NOTREADY,
        labels=labels,
        annotations={"note": "x" * 100},
    )
    raw = pb.ListPodSandboxResponse(items=[item]).SerializeToString()
    (pod,) = entries_of(raw, "sandbox", read_sandbox, lambda what: None)
    assert (pod.id, pod.name, pod.uid, pod.namespace, pod.attempt) == ("s", "n", "u", "ns", 3)
    assert (pod.ready, pod.annotations) == (ready, {})
    assert pod.labels == labels
