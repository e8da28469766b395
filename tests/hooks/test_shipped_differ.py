"""The log lines of the shipped hook 90-differ, and the template 00-template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.hooks import testing
from proxy.hooks.facts import Mount
from proxy.hooks.hook import Hook
from proxy.logs import log
from proxy.model.errors import HookError
from proxy.model.idset import CpuSet

HOOK = Path(__file__).resolve().parents[2] / "hooks/90-differ.py"


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(log, "info", lambda text, **context: lines.append({"text": text, **context}))
    return lines


def differ(**config: Any) -> testing.Loaded:
    return testing.load(HOOK, config or None)


def hook_with_answer(name: str, point: str, answer: testing.Adjustment) -> Hook:
    return Hook(name, name, {point: lambda event: answer})


def test_one_line_names_changes_and_hooks_and_no_secrets(reported: list[dict[str, Any]]) -> None:
    one = testing.Adjustment(
        cpu_quota=-1, cpus=CpuSet((2,)), envs={"TOKEN": "s3cret"}, labels={"a": "s3cret"}
    )
    two = testing.Adjustment(
        envs={"OLD": testing.CLEAR},
        mounts={"/run/x": Mount("/run/x", "/host/x", readonly=True)},
        updates={"c2": testing.Update(cpus=CpuSet((3,)), unified={"memory.high": "9"})},
    )
    point = "pre_create_container"
    hooks: list[testing.Loaded | Hook] = [
        hook_with_answer("10-a", point, one),
        hook_with_answer("koordlet", point, two),
        differ(),
    ]
    outcome = testing.run(hooks, testing.event(point))
    assert outcome.adjustment.cpu_quota == -1
    assert reported == [
        {
            "text": "hooks changed a request",
            "call": "CreateContainer",
            "pod": "shop/db-0",
            "container": "main",
            "changes": "10-a: cpus any -> 2, cpu_quota 400000 -> -1, labels[a], envs[TOKEN]; "
            "koordlet: envs[OLD] cleared, mounts[/run/x] /host/x (read-only), updates[c2].cpus 3, "
            "updates[c2].unified[memory.high]",
        }
    ]


def test_values_are_logged_if_configured(reported: list[dict[str, Any]]) -> None:
    answer = testing.Adjustment(envs={"TOKEN": "s3cret"})
    hooks: list[testing.Loaded | Hook] = [
        hook_with_answer("10-a", "pre_create_container", answer),
        differ(values=True),
    ]
    testing.run(hooks, testing.event("pre_create_container"))
    assert reported[0]["changes"] == "10-a: envs[TOKEN] s3cret"


@pytest.mark.parametrize(
    ("point", "answer", "call", "changes"),
    [
        ("pre_run_pod_sandbox", testing.Adjustment(cgroup_parent="/x"), "RunPodSandbox", "cgroup_parent /x"),
        (
            "pre_update_container_resources",
            testing.Adjustment(cpu_shares=testing.CLEAR),
            "UpdateContainerResources",
            "cpu_shares 2048 -> cleared",
        ),
    ],
)
def test_changes_of_other_calls_are_logged(
    reported: list[dict[str, Any]], point: str, answer: testing.Adjustment, call: str, changes: str
) -> None:
    testing.run([hook_with_answer("10-a", point, answer), differ()], testing.event(point))
    assert (reported[0]["call"], reported[0]["changes"]) == (call, f"10-a: {changes}")


def test_an_unchanged_request_is_not_logged(reported: list[dict[str, Any]]) -> None:
    assert testing.run(differ(), testing.event("pre_create_container")) == testing.Outcome()
    testing.run(differ(), testing.event("validate_create_container", adjustment=testing.NOTHING, owners={}))
    assert reported == []


def test_the_template_works_as_documented() -> None:
    path = HOOK.with_name("00-template.py")
    pod = testing.pod(annotations={"example.com/note": "hello"})
    event = testing.event("pre_create_container", pod=pod)
    assert testing.run(testing.load(path), event).adjustment.envs == {"NOTE": "hello"}
    assert testing.run(testing.load(path, {"variable": "MEMO"}), event).adjustment.envs == {"MEMO": "hello"}
    assert "longer than 4" in testing.run(testing.load(path, {"longest": 4}), event).refusal
    own = testing.event("pre_create_container", pod=pod, container=testing.container(envs={"NOTE": "mine"}))
    assert testing.run(testing.load(path), own) == testing.Outcome()
    with pytest.raises(HookError, match="longest must be at least 1"):
        testing.load(path, {"longest": 0})
