"""The quicker ``__init__`` of frozen dataclasses: it does what the one of ``dataclasses`` does."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from typing import Any

import pytest

from proxy.hooks.answers import Adjustment
from proxy.hooks.events import PreCreateContainer
from proxy.hooks.facts import ContainerFacts, Decision, PodFacts, Resources
from proxy.hooks.hook import Outcome
from proxy.hooks.slot_init import slot_init

MADE = (Adjustment, ContainerFacts, Decision, Outcome, PodFacts, PreCreateContainer, Resources)


@dataclass(frozen=True, slots=True)
class Usual:
    name: str
    count: int = 3
    labels: Mapping[str, str] = field(default_factory=dict)
    last: str = field(default="z", kw_only=True)
    entries: list[int] = field(default_factory=list, kw_only=True)


Quick = slot_init(
    dataclass(frozen=True, slots=True)(
        type("Quick", (), {k: vars(Usual)[k] for k in ("__annotations__", "__module__")} | {
            "count": 3,
            "labels": field(default_factory=dict),
            "last": field(default="z", kw_only=True),
            "entries": field(default_factory=list, kw_only=True),
        })
    )
)  # fmt: skip


@pytest.mark.parametrize("args", [("a",), ("a", 4), ("a", 4, {"k": "v"})])
@pytest.mark.parametrize("more", [{}, {"last": "y"}, {"last": "y", "entries": [1]}])
def test_fields_are_set_as_by_the_usual_init(args: tuple[Any, ...], more: dict[str, Any]) -> None:
    quick, usual = Quick(*args, **more), Usual(*args, **more)
    assert [getattr(quick, each.name) for each in fields(Usual)] == [
        getattr(usual, each.name) for each in fields(Usual)
    ]


@pytest.mark.parametrize(
    "more", [{}, {"name": "a", "unknown": 1}, {"name": "a", "last": "y", "count": 1, "x": 2}]
)
def test_wrong_arguments_are_refused_with_the_usual_message(more: dict[str, Any]) -> None:
    with pytest.raises(TypeError) as usual:
        Usual(**more)
    with pytest.raises(TypeError) as quick:
        Quick(**more)
    assert str(quick.value) == str(usual.value).replace("Usual", "Quick")


def test_the_signature_remains_the_same() -> None:
    assert str(inspect.signature(Quick)) == str(inspect.signature(Usual))


def test_each_value_has_maps_of_its_own() -> None:
    one, other = Adjustment(), Adjustment()
    assert one.envs == {}
    assert one.envs is not other.envs
    assert one.envs is not one.labels


@pytest.mark.parametrize("kind", MADE)
def test_values_are_frozen_and_can_be_copied(kind: type[Any]) -> None:
    given = {"pod": PodFacts(), "container": ContainerFacts(), "decision": Decision("shared", None)}
    needed = {name for name, each in inspect.signature(kind).parameters.items() if each.default is each.empty}
    first = fields(kind)[0].name
    one = Decision("shared", None) if kind is Decision else kind(**{name: given[name] for name in needed})
    with pytest.raises(FrozenInstanceError):
        setattr(one, first, None)
    assert copy.copy(one) == replace(one) == pickle.loads(pickle.dumps(one)) == one
