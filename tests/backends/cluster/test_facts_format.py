"""Files of the cluster agent: what cannot be used changes nothing, and each state has one clear problem."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from proxy.backends.cluster.facts_format import (
    CURRENT_S,
    FILE_LIMIT_BYTES,
    SCHEMA,
    ClusterFacts,
    FactsKind,
    decode_facts,
    encode_facts,
    namespace_labels,
)
from proxy.backends.cluster.files import ClusterNamespaces, ClusterNode

NODE = {
    "kind": "Node",
    "metadata": {"name": "n1", "labels": {"a": "1"}},
    "status": {"capacity": {"cpu": "4"}},
}


def node_facts(label: str = "1", **changed: Any) -> bytes:
    item = {**NODE, "metadata": {"name": "n1", "labels": {"a": label}}}
    facts = {"kind": FactsKind.NODE, "node": "n1", "read_at": 100.0, "resource_version": "5", "items": [item]}
    return encode_facts(ClusterFacts(**{**facts, **changed}))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def written(path: Path, data: bytes, at: float = 1000.0) -> None:
    draft = path.with_suffix(".new")
    draft.write_bytes(data)
    draft.chmod(0o600)
    os.utime(draft, (at, at))
    draft.replace(path)


@pytest.fixture
def file(tmp_path: Path) -> ClusterNode:
    tmp_path.chmod(0o700)
    return ClusterNode(tmp_path, Clock())


def label(file: ClusterNode) -> str | None:
    meta = file.read()
    return None if meta is None else meta.labels["a"]


def test_encoded_facts_decode_to_the_same() -> None:
    facts = ClusterFacts(FactsKind.PODS, "n1", 12.5, "77", [{"metadata": {"name": "web"}}])
    assert decode_facts(encode_facts(facts), FactsKind.PODS) == facts
    assert json.loads(encode_facts(facts)).keys() == {
        "kind", "node", "readAt", "resourceVersion", "items", "schema",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not a file of the cluster agent"),
        (b"{", "not a file of the cluster agent"),
        (node_facts()[:-9], "not a file of the cluster agent"),
        (b"\xff\xfe", "not a file of the cluster agent"),
        (b"[1]", "not a file of the cluster agent"),
        (b'{"kind": "node"}', "missing required field"),
        (node_facts().replace(b"100.0", b'"x"'), "readAt"),
        (b"[" * 5000, "not a file of the cluster agent"),
        (node_facts(schema="topoproxy-cluster-facts/9"), f"this version reads {SCHEMA}"),
        (node_facts(kind=FactsKind.PODS), "it has pods, not node"),
        (node_facts(items=[]), "it has 0 Node objects, not one"),
        (node_facts(items=[{"kind": "Pod"}]), "it is of kind 'Pod', not a Node"),
        (node_facts(items=[{"kind": "Node"}]), "no metadata"),
    ],
)
def test_a_file_that_cannot_be_used_leaves_the_last_good_one_in_effect(
    file: ClusterNode, data: bytes, why: str
) -> None:
    written(file.path, data)
    assert label(file) is None
    assert why in file.problem
    assert "stays in effect" not in file.problem
    written(file.path, node_facts("1"))
    assert (label(file), file.problem) == ("1", "")
    written(file.path, data)
    for _ in range(2):  # it is not read again, and its error stays reported
        assert label(file) == "1"
        assert why in file.problem
        assert file.problem.endswith("(its last content stays in effect)")
        assert len(file.problem) < 500
    page = file.page()
    assert (page["problem"], page["resourceVersion"], page["items"]) == (file.problem, "5", 1)
    written(file.path, node_facts("2"))
    assert (label(file), file.problem) == ("2", "")


def test_a_huge_file_is_not_read(file: ClusterNode) -> None:
    written(file.path, b"")
    os.truncate(file.path, FILE_LIMIT_BYTES + 1)
    assert label(file) is None
    assert "larger than 16 MiB" in file.problem


def test_facts_that_are_too_large_are_not_written() -> None:
    with pytest.raises(ValueError, match="the limit is 16 MiB"):
        node_facts("x" * FILE_LIMIT_BYTES)


def test_a_file_that_is_gone_stays_in_effect(file: ClusterNode) -> None:
    assert label(file) is None
    assert file.problem == f"cannot read {file.path}: there is no such file"
    written(file.path, node_facts())
    assert label(file) == "1"
    file.path.unlink()
    assert label(file) == "1"
    assert "there is no such file (its last content stays in effect)" in file.problem


def test_a_file_that_others_may_write_is_not_used(file: ClusterNode) -> None:
    written(file.path, node_facts())
    file.path.chmod(0o622)
    assert label(file) is None
    assert "can be written by its group and others" in file.problem
    file.path.chmod(0o600)
    assert label(file) == "1"


def test_a_path_that_is_not_a_regular_file(file: ClusterNode) -> None:
    file.path.mkdir()
    assert label(file) is None
    assert "not a regular file" in file.problem


def test_confirming_a_file_makes_it_current_and_reads_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    clock = Clock()
    file = ClusterNode(tmp_path, clock)
    assert not file.is_current
    written(file.path, node_facts(), clock.now)
    first = file.read()
    assert file.is_current
    clock.now += CURRENT_S + 1
    assert file.read() is first
    assert not file.is_current
    assert (file.page()["read_s"], file.page()["confirmed_s"]) == (clock.now - 100.0, CURRENT_S + 1)
    os.utime(file.path, (clock.now, clock.now))
    assert file.read() is first
    assert file.is_current
    assert (file.page()["read_s"], file.page()["confirmed_s"]) == (clock.now - 100.0, 0.0)


def test_a_clock_set_back_does_not_keep_a_file_current(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    clock = Clock()
    file = ClusterNode(tmp_path, clock)
    written(file.path, node_facts(), clock.now + 5000)
    file.read()
    assert not file.is_current
    assert file.page()["confirmed_s"] == 0.0


def test_the_page_before_anything_was_read(file: ClusterNode) -> None:
    assert file.page() == {
        "name": "node",
        "path": str(file.path),
        "node": "",
        "resourceVersion": "",
        "items": 0,
        "read_s": None,
        "confirmed_s": None,
        "problem": "",
    }


def test_labels_of_namespaces(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    items = [
        {"metadata": {"name": "a", "labels": {"tier": "gold"}}},
        {"metadata": {"name": "b"}},
        {"metadata": {"name": "c", "labels": {"tier": 7, "x": "y"}}},
        {"metadata": {"name": 5}},
        {"metadata": "odd"},
        {},
    ]
    facts = ClusterFacts(FactsKind.NAMESPACES, "n1", 1.0, "9", items)
    wanted = {"a": {"tier": "gold"}, "b": {}, "c": {"x": "y"}}
    assert namespace_labels(facts) == wanted
    file = ClusterNamespaces(tmp_path, Clock())
    written(file.path, encode_facts(facts))
    assert file.read() == wanted
