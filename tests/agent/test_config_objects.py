"""TopoproxyConfig objects: their content, the one that applies on a node, and what is written about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from msgspec import structs

from proxy.agent.config_objects import (
    ANNOTATION,
    MOST_STATUS_NODES,
    ConfigAnswer,
    applicable_object,
    config_object,
    has_room,
    node_annotation,
    object_status,
)

CRD = yaml.safe_load((Path(__file__).parents[2] / "deploy/crds/topoproxyconfigs.yaml").read_text())
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def item(name: str = "a", **spec: Any) -> dict[str, Any]:
    found = {
        "apiVersion": "topoproxy.io/v1alpha1",
        "kind": "TopoproxyConfig",
        "metadata": {"name": name, "generation": 3},
        "spec": {"config": {"log": {"level": "debug"}}, **spec},
    }
    jsonschema.validate(found, SCHEMA)
    return found


def chosen(labels: dict[str, str], *items: dict[str, Any]) -> str:
    found = applicable_object(map(config_object, items), labels)
    return "" if found is None else found.name


def test_an_object_is_read() -> None:
    found = config_object(item(priority=7))
    assert (found.name, found.generation, found.priority, found.selector.all) == ("a", 3, 7, True)
    assert json.loads(found.text) == {"log": {"level": "debug"}}
    assert yaml.safe_load(found.text) == json.loads(found.text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"metadata": {"name": "a"}, "spec": {}},
        {"metadata": {"name": "a"}, "spec": {"config": []}},
        {"metadata": {"name": "a"}},
        {"spec": {"config": {}}},
        {
            "metadata": {"name": "a"},
            "spec": {"config": {}, "nodeSelector": {"matchExpressions": [{"key": "a", "operator": "Near"}]}},
        },
        {"metadata": {"name": "a"}, "spec": {"config": {}, "priority": "high"}},
    ],
)
def test_invalid_objects_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, LookupError)):
        config_object(wrong)


def test_the_highest_priority_applies_and_then_the_first_name() -> None:
    assert chosen({}) == ""
    assert chosen({}, item("b"), item("a")) == "a"
    assert chosen({}, item("b", priority=1), item("a")) == "b"
    assert chosen({}, item("b", priority=-1), item("c")) == "c"


def test_only_objects_that_select_the_node_count() -> None:
    gold = item("gold", priority=9, nodeSelector={"matchLabels": {"tier": "gold"}})
    odd = item("odd", nodeSelector={"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]})
    assert chosen({"tier": "gold", "zone": "a"}, odd, gold) == "gold"
    assert chosen({"zone": "a"}, odd, gold) == "odd"
    assert chosen({"zone": "b"}, odd, gold) == ""


def test_the_status_entry_of_a_node() -> None:
    accepted = ConfigAnswer("a", 3, accepted=True)
    refused = ConfigAnswer("a", 4, accepted=False, reason="log.level: this node does not permit it")
    assert node_annotation(None) == {ANNOTATION: None}
    assert json.loads(node_annotation(accepted)[ANNOTATION] or "") == {
        "name": "a",
        "generation": 3,
        "accepted": True,
    }
    for answer in (accepted, refused):
        status = object_status(answer.name, answer, "n1")
        jsonschema.validate({**item(), **status}, SCHEMA)
        (entry,) = status["status"]["nodes"]
        assert (entry["name"], entry["accepted"], entry.get("reason", "")) == (
            "n1",
            answer.accepted,
            answer.reason,
        )


def test_the_crd_has_the_same_limit() -> None:
    assert SCHEMA["properties"]["status"]["properties"]["nodes"]["maxItems"] == MOST_STATUS_NODES


def test_a_status_lists_so_many_nodes() -> None:
    found = config_object(item())
    full = structs.replace(found, nodes=frozenset(f"n{i}" for i in range(MOST_STATUS_NODES)))
    assert has_room(found, "n1")
    assert has_room(full, "n1"), "its own entry is there"
    assert not has_room(full, "another")
