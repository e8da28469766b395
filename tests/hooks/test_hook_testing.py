"""The kit for tests of hooks, as their authors use it."""

from __future__ import annotations

import asyncio
import doctest
from pathlib import Path

import pytest

from proxy.hooks import testing
from proxy.hooks.events import POINTS
from proxy.hooks.facts import Running
from proxy.hooks.hook import Hook
from proxy.hooks.samples import OWN, POD, existing, sample
from proxy.model.errors import HookError, InputError, TopologyError
from proxy.model.idset import CpuSet, Mask


def write_hook(directory: Path, body: str, name: str = "50-tried.py", head: str = "API_VERSION = 1") -> Path:
    path = directory / name
    path.write_text(f"from proxy.hooks.api import *\n{head}\n{body}\n")
    return path


def test_the_example_in_its_documentation_works() -> None:
    result = doctest.testmod(testing)
    assert result.attempted > 5
    assert result.failed == 0


@pytest.mark.parametrize("name", sorted(POINTS))
def test_a_hook_can_be_called_at_every_point(name: str) -> None:
    received: list[object] = []
    event = testing.event(name)
    assert testing.run(Hook("x", "x", {name: received.append}), event) == testing.Outcome()
    assert received == [event] == [sample(name)]


def test_synchronize_has_the_time_that_the_daemon_gives_it(tmp_path: Path) -> None:
    slow = "import time\ndef synchronize(event): time.sleep(0.3)\npre_create_container = synchronize"
    hook = write_hook(tmp_path, slow, head="API_VERSION = 1\nTIMEOUT = 0.05")
    assert testing.run(testing.load(hook), testing.event("synchronize")) == testing.Outcome()
    with pytest.raises(AssertionError, match="no answer within 50 ms at pre_create_container"):
        testing.run(testing.load(hook), testing.event("pre_create_container"))


def test_a_hook_is_configured_before_other_calls(tmp_path: Path) -> None:
    path = write_hook(
        tmp_path,
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Settings:\n    names: tuple[str, ...] = ()\n    deep: dict[str, str] | None = None\n"
        "mine = None\n"
        "def configure(event):\n    global mine\n    mine = (event.name, event.settings)\n"
        "def pre_create_container(event):\n"
        "    return Adjustment(envs={'A': f'{mine[0]} {mine[1].names} {mine[1].deep}'})",
    )
    hook = testing.load(path, {"names": ["a", "b"], "deep": {"k": "v"}})
    reported = testing.run(hook, testing.event("pre_create_container")).adjustment.envs["A"]
    assert reported == "50-tried ('a', 'b') {'k': 'v'}"
    with pytest.raises(HookError, match=r"hooks\.settings\.50-tried\.config\.nams: unknown key"):
        testing.load(path, {"nams": []})


def test_a_file_of_any_owner_can_be_loaded(tmp_path: Path) -> None:
    path = write_hook(tmp_path, "def shutdown(event): pass")
    path.chmod(0o666)
    assert testing.load(path).hook.name == "50-tried"


def test_a_bad_file_or_a_failed_configure_is_reported(tmp_path: Path) -> None:
    with pytest.raises(HookError, match="has no API_VERSION"):
        testing.load(write_hook(tmp_path, "def shutdown(event): pass", head=""))
    with pytest.raises(HookError, match="no, thanks"):
        testing.load(write_hook(tmp_path, "def configure(event):\n    raise ValueError('no, thanks')"))


def test_several_hooks_are_called_in_order_and_conflicts_are_failures(tmp_path: Path) -> None:
    one = write_hook(
        tmp_path, "def pre_create_container(event):\n    return Adjustment(cpu_shares=2)", "20-b.py"
    )
    two = write_hook(
        tmp_path, "def pre_create_container(event):\n    return Adjustment(cpu_shares=4)", "10-a.py"
    )
    hooks = [testing.load(one), testing.load(two)]
    with pytest.raises(AssertionError, match=r"hook 20-b: .*cpu_shares.*10-a"):
        testing.run(hooks, testing.event("pre_create_container"))
    outcome = testing.run(hooks, testing.event("pre_create_container"), allow_failures=True)
    assert outcome.adjustment.cpu_shares == 4
    assert dict(outcome.owners) == {"cpu_shares": "10-a"}


def test_a_hook_that_raises_shows_where(tmp_path: Path) -> None:
    path = write_hook(tmp_path, "def pre_create_container(event): return event.pod.labels['app']")
    with pytest.raises(AssertionError, match=r"hook 50-tried: KeyError: 'app' \(50-tried\.py:3 in"):
        testing.run(testing.load(path), testing.event("pre_create_container", pod=testing.pod()))


def test_the_deadline_is_that_of_the_engine(tmp_path: Path) -> None:
    path = write_hook(tmp_path, "import time\nTIMEOUT = 0.05\ndef shutdown(event):\n    time.sleep(0.5)")
    with pytest.raises(AssertionError, match="hook 50-tried"):
        testing.run(testing.load(path), testing.event("shutdown"))


def test_vetoes_and_validation_are_in_the_outcome(tmp_path: Path) -> None:
    path = write_hook(
        tmp_path,
        "def pre_create_container(event):\n    return Adjustment(envs={'A': 'b'})\n"
        "def validate_create_container(event):\n    return Veto('no ' + event.adjustment.envs['A'])",
    )
    outcome = testing.run(testing.load(path), testing.event("pre_create_container"))
    assert "50-tried" in outcome.refusal
    assert "no b" in outcome.refusal


def test_coroutine_hooks_can_be_called_from_a_coroutine(tmp_path: Path) -> None:
    path = write_hook(
        tmp_path,
        "import asyncio\n"
        "async def post_start_container(event):\n"
        "    await asyncio.sleep(0)\n    return Adjustment(updates={'c2': Update(cpus=CpuSet((1,)))})",
    )

    async def inside() -> testing.Outcome:
        return testing.run(testing.load(path), testing.event("post_start_container"))

    assert asyncio.run(inside()).adjustment.updates["c2"].cpus == CpuSet((1,))


def test_builders_have_sensible_defaults() -> None:
    decision = testing.decision("own", "2-3", "1")
    assert (decision.own, decision.allowed) == (CpuSet((2, 3)), CpuSet((2, 3)))
    assert decision.allowed_mems == Mask((1,))
    shared = testing.decision("shared", cpus=CpuSet((4,)), unlimited=True)
    assert (shared.own, shared.allowed, shared.unlimited) == (CpuSet(), CpuSet((4,)), True)
    assert testing.decision("be").pool == "be"
    assert testing.decision("system", "0").pool == "system"
    assert testing.pod().annotations == {}
    assert testing.pod(qos="BE", annotations={"a": "b"}).annotations == {"a": "b"}
    container = testing.container(resources={"cpu_quota": 5})
    assert (container.resources.cpu_quota, container.resources.cpu_shares) == (5, 4096)
    assert (container.phase, container.id, container.envs) == ("creating", "", {})
    assert testing.container(id="c").phase == "running"
    one = testing.running("c9", container=existing(testing.container(name="x"), "c0"))
    assert (one.container.id, one.container.name, one.container.phase) == ("c9", "x", "running")
    assert testing.event("synchronize", containers=(one,)).containers == (one,)
    assert testing.running() == Running(POD, existing(container_id="c1"), OWN)
    assert testing.running(pod=testing.pod(), decision=shared).decision == shared


def test_a_machine_has_the_requested_parts() -> None:
    machine = testing.machine()
    assert [str(node.cpus) for node in machine.nodes] == ["0-3,8-11", "4-7,12-15"]
    assert str(machine.groups("core")[0]) == "0,8"
    single = testing.machine(1, 2, 2, 1, isolated=CpuSet((3,)))
    assert (len(single.nodes), str(single.online), str(single.isolated)) == (2, "0-3", "3")
    assert testing.event("synchronize", machine=single).machine == single
    with pytest.raises(TopologyError, match="counts are 1 or more"):
        testing.machine(0)


@pytest.mark.parametrize(
    "does",
    [
        "event.container.envs['A'] = 'b'",
        "del event.pod.labels['a']",
        "event.container.resources.unified['memory.high'] = '1'",
        "return Adjustment(labels=event.pod.labels | {'a': 'b'})",
        "event.container.args.append('b')",
        "__import__('json').dumps(event.pod.labels)",
    ],
)
def test_an_action_that_fails_on_a_node_fails_in_a_test(tmp_path: Path, does: str) -> None:
    hook = testing.load(write_hook(tmp_path, f"def pre_create_container(event):\n    {does}"))
    event = testing.event("pre_create_container", pod=testing.pod(labels={"a": "b"}))
    with pytest.raises(AssertionError, match="Error: "):
        testing.run(hook, event)
    assert event.pod.labels == {"a": "b"}
    with pytest.raises(TypeError, match="cannot be changed: answer with an Adjustment"):
        testing.event("pre_create_container").container.envs["A"] = "b"


def test_an_invalid_event_is_reported() -> None:
    with pytest.raises(InputError, match="'pre_lunch'"):
        testing.event("pre_lunch")
    with pytest.raises(TypeError, match="podd"):
        testing.event("pre_create_container", podd=testing.pod())
