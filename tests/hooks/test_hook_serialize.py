"""Events and answers as plain data: all fields are kept, and invalid data is refused."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.hooks.answers import CLEAR, LEAVE, MAPS, Adjustment, Update
from proxy.hooks.events import POINTS, Configure, PreCreateContainer
from proxy.hooks.facts import Decision, Device, Mount
from proxy.hooks.hook import Outcome
from proxy.hooks.samples import MACHINES, machine, sample
from proxy.hooks.serialize import (
    adjustment_to_data,
    event_from_data,
    event_to_data,
    example,
    outcome_to_data,
)
from proxy.model.errors import InputError
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from tests.oracles.hook_data import adjustment_from

TEXTS = st.text(max_size=6) | st.just("lone \udcff")
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXTS,
    int: st.integers(-(2**63), 2**63),
    bool: st.booleans(),
    CpuSet: st.builds(CpuSet, st.sets(st.integers(0, 300), max_size=4)),
    Mask: st.builds(Mask, st.sets(st.integers(0, 8), max_size=3)),
    Machine: st.sampled_from(list(MACHINES)).map(machine),
    Any: st.none() | st.dictionaries(TEXTS, st.integers(), max_size=2),
    type(None): st.none(),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Anything that a field may hold, by its type."""
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(
            kind, **{field.name: values(hints[field.name]) for field in dataclasses.fields(kind)}
        )
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Mapping:
        return st.dictionaries(TEXTS, values(parts[1]), max_size=2)
    if origin is Sequence:
        return st.lists(values(parts[0]), max_size=2).map(tuple)
    if origin is typing.Literal:
        return st.sampled_from(parts)
    return st.one_of([values(part) for part in parts])


def create(**facts: object) -> dict[str, object]:
    return {"point": "pre_create_container", **facts}


def run(**pod: object) -> dict[str, object]:
    return {"point": "post_run_pod_sandbox", "pod": pod}


@pytest.mark.parametrize("name", sorted(POINTS))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_an_event_is_unchanged_by_a_round_trip_through_json(name: str, data: st.DataObject) -> None:
    event = data.draw(values(POINTS[name]))
    text = json.dumps(event_to_data(event))
    assert event_from_data(json.loads(text)) == event


@settings(max_examples=100, deadline=None)
@given(values(Adjustment))
def test_an_adjustment_is_unchanged_by_a_round_trip_and_has_only_its_fields(adjustment: Adjustment) -> None:
    data = adjustment_to_data(adjustment)
    assert adjustment_from(json.loads(json.dumps(data))) == adjustment
    assert set(data) == {name for name, _ in adjustment.set_fields()}


def test_none_and_removal_are_distinguished() -> None:
    adjustment = Adjustment(
        cpus=CLEAR,
        mems=Mask((0, 1)),
        envs={"A": "b", "C": CLEAR},
        mounts={"/m": Mount("/m", "/host", True), "/n": CLEAR},
        devices={"/dev/x": Device("/dev/x", "/dev/y")},
        updates={"c1": Update(cpus=CpuSet((1, 2)), unified={"memory.high": "1"}), "c2": Update()},
    )
    assert adjustment_to_data(adjustment) == {
        "cpus": None,
        "mems": "0-1",
        "envs": {"A": "b", "C": None},
        "mounts": {
            "/m": {"container_path": "/m", "host_path": "/host", "readonly": True, "propagation": "private"},
            "/n": None,
        },
        "devices": {
            "/dev/x": {"container_path": "/dev/x", "host_path": "/dev/y", "permissions": "rw"},
        },
        "updates": {"c1": {"cpus": "1-2", "unified": {"memory.high": "1"}}, "c2": {}},
    }
    assert adjustment_from({}) == Adjustment()
    assert adjustment_from({"cpu_quota": None}).cpu_quota is CLEAR
    assert adjustment_from({}).cpu_quota is LEAVE
    assert {name for name in MAPS if getattr(adjustment_from({}), name)} == set()


@pytest.mark.parametrize("name", sorted(POINTS))
def test_the_example_of_each_point_has_all_its_fields_and_is_the_sample(name: str) -> None:
    data = json.loads(json.dumps(example(name)))
    assert set(data) == {"point"} | {field.name for field in dataclasses.fields(POINTS[name])}
    assert event_from_data(data) == sample(name)
    assert len(json.dumps(data)) < 8000, "an example fits on a page"


def test_there_is_no_example_of_an_unknown_point() -> None:
    with pytest.raises(InputError, match="'pre_lunch'"):
        example("pre_lunch")


def test_missing_keys_have_the_values_of_the_engine() -> None:
    decision = {"pool": "own", "cpus": "2-3", "own": "2-3", "mems": "1"}
    event = event_from_data({"point": "pre_create_container", "decision": decision})
    assert isinstance(event, PreCreateContainer)
    assert event.decision.allowed == CpuSet((2, 3))
    assert event.decision.allowed_mems == Mask((1,))
    assert event.pod.ref == "/"
    reported = event_from_data({"point": "pre_create_container", "decision": {"cpus": "2", "allowed": "0-7"}})
    assert isinstance(reported, PreCreateContainer)
    assert reported.decision.allowed == CpuSet(range(8))
    assert Decision().allowed == CpuSet()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "the event: it must be an object"),
        ({}, "point: it is missing; topoproxy hooks points lists them"),
        ({"point": ["shutdown"]}, r"point: there is no hook point \['shutdown'\]; topoproxy"),
        ({"point": "pre_lunch"}, "point: there is no hook point 'pre_lunch'; topoproxy"),
        ({"point": "pre_create"}, "point: there is no hook point 'pre_create'; did you mean pre_create_c"),
        ({"point": "shutdown", "reason": 5}, "reason: it must be a string, not 5"),
        ({"point": "shutdown", "why": ""}, "why: no such key; there are reason"),
        ({"point": "pre_stop_container", "grace": True}, "grace: it must be a whole number, not true"),
        ({"point": "pre_stop_container", "grace": 1.0}, "grace: it must be a whole number"),
        (run(labels={"a": None}), r"pod\.labels\[a\]: it must be a string"),
        (run(labels={1: "a"}), r"pod\.labels: it must be an object"),
        (create(decision={"cpus": "3-1"}), r"decision\.cpus: range '3-1'"),
        (create(decision={"cpus": 3}), r"decision\.cpus: it must be a list such as"),
        (create(container={"mounts": [{}]}), r"mounts\[0\]\.container_path: it is missing"),
        (create(container={"args": "a"}), r"container\.args: it must be a list"),
        ({"point": "machine_changed"}, "before: it is missing"),
        ({"point": "synchronize", "machine": {"cpu_rows": []}}, "machine: cpu_rows must be"),
        ({"point": "validate_create_container", "event": create()}, r"event\.point: no such key"),
    ],
)  # fmt: skip
def test_invalid_data_is_refused_with_its_path(data: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        event_from_data(data)


def test_an_outcome_names_the_hook_of_each_change() -> None:
    outcome = Outcome(Adjustment(cpu_quota=-1), {"cpu_quota": "20-quota-off"}, "")
    assert outcome_to_data(outcome) == {
        "adjustment": {"cpu_quota": -1},
        "owners": {"cpu_quota": "20-quota-off"},
        "refusal": "",
    }


def test_settings_of_a_hook_become_an_object() -> None:
    @dataclasses.dataclass
    class Settings:
        root: str = "/run"

    event = Configure(Settings(), "30-example")
    assert event_to_data(event) == {"point": "configure", "settings": {"root": "/run"}, "name": "30-example"}
