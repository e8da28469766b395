"""The public interface of hooks: points, facts, answers."""

from __future__ import annotations

import dataclasses

import pytest

from proxy.hooks import api
from proxy.hooks.answers import FIELDS, MAPS
from proxy.hooks.events import POINTS, VALIDATES, Point, PreCreateContainer
from proxy.model.idset import CpuSet

CALLS = ("run_pod_sandbox", "create_container", "start_container", "update_container_resources")
ENDS = ("stop_container", "remove_container", "stop_pod_sandbox", "remove_pod_sandbox")


def test_there_are_points_before_and_after_each_call() -> None:
    expected = {f"{when}_{call}" for when in ("pre", "post") for call in CALLS + ENDS}
    expected |= set(VALIDATES.values())
    expected |= {"synchronize", "machine_changed", "pools_changed", "configure", "shutdown"}
    assert set(POINTS) == expected


@pytest.mark.parametrize("name", sorted(POINTS))
def test_each_point_documents_itself_and_all_its_fields(name: str) -> None:
    point = POINTS[name]
    assert name == point.NAME
    docstring = point.__doc__ or ""
    for field in dataclasses.fields(point):
        assert field.name in docstring, f"{point.__name__}.{field.name} is not documented"
    assert set(FIELDS) >= point.TAKES
    assert getattr(api, point.__name__) is point


def test_calls_that_cannot_be_undone_cannot_be_refused() -> None:
    assert not any(POINTS[f"{when}_{call}"].VETO for when in ("pre", "post") for call in ENDS)
    assert not any(POINTS[f"post_{call}"].VETO for call in CALLS)
    assert all(POINTS[f"pre_{call}"].VETO for call in CALLS)


def test_an_adjustment_distinguishes_none_value_and_removal() -> None:
    assert not api.Adjustment()
    assert not api.Adjustment(envs={}, cpus=api.LEAVE)
    cleared = api.Adjustment(cpus=api.CLEAR, cpu_quota=0, annotations={"a": api.CLEAR})
    assert dict(cleared.set_fields()) == {"cpus": api.CLEAR, "cpu_quota": 0, "annotations": {"a": api.CLEAR}}
    assert dict(api.Adjustment(cpus=CpuSet((1,))).set_fields()) == {"cpus": CpuSet((1,))}
    assert set(FIELDS) >= MAPS


def test_the_interface_exports_all_names_that_hooks_need() -> None:
    for name in api.__all__:
        assert hasattr(api, name)
    for point in POINTS.values():
        assert point.__name__ in api.__all__


def test_two_hook_points_of_one_name_are_an_error() -> None:
    namespace = {"__module__": "tests.elsewhere", "__qualname__": "PreCreateContainer"}
    with pytest.raises(TypeError, match=r"cannot add the hook point tests\.elsewhere\.PreCreateContainer: "):
        type("PreCreateContainer", (Point,), namespace)
    assert POINTS["pre_create_container"] is PreCreateContainer
