"""Rules for every shipped hook file; new files are tested without a change here."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.hooks import samples, testing
from proxy.hooks.events import POINTS
from proxy.hooks.facts import Decision, Mount, Pools, Resources
from proxy.hooks.loader.loading import load_file
from proxy.hooks.loader.schema import keys_of
from proxy.model.idset import CpuSet, Mask
from tests.testkit.changed_copy import changed_copy

DIRECTORY = Path(__file__).resolve().parents[2] / "hooks"
FILES = sorted(DIRECTORY.glob("*.py"))
OLD = sorted(DIRECTORY.parent.glob("tests/old_hooks/*/*.py"))
HOOKS = pytest.mark.parametrize("path", [*FILES, *OLD], ids=lambda path: f"{path.parent.name}-{path.stem}")

DECISIONS = (
    samples.OWN,
    samples.SHARED,
    samples.BE,
    Decision(),
    testing.decision("own", "0-3,128-255", "0-1", unlimited=True),
    testing.decision("system", "0"),
    changed_copy(testing.decision("own", "2-5"), own=CpuSet((2,)), allowed=CpuSet((2,))),
)
HOSTILE = (
    "",
    " ",
    "-1",
    "true",
    "disable",
    "../../etc",
    "/",
    "a" * 5000,
    "é\n%s{x}",
    "max_latency:99999999999",
)
KEYS = (
    "topoproxy.io/cpus-file", "example.com/note", "cpu-quota.crio.io", "irq-load-balancing.crio.io",
    "cpu-load-balancing.crio.io", "cpu-c-states.crio.io", "cpu-freq-governor.crio.io",
    "cpu-shared.crio.io/main",
)  # fmt: skip
PODS = (
    testing.pod(),
    testing.pod(uid="", name="", namespace="", qos="", kube_qos="BestEffort", cgroup_parent=""),
    testing.pod(uid="../..", name="a/b", cgroup_parent="../../.."),
    *(testing.pod(annotations=dict.fromkeys(KEYS, value)) for value in HOSTILE),
    testing.pod(annotations=dict.fromkeys(KEYS, "enable") | {"irq-load-balancing.crio.io": "housekeeping"}),
)
CONTAINERS = (
    testing.container(),
    testing.container(name="", image="", resources=Resources()),
    testing.container(name="../../x", attempt=-1, resources={"cpu_quota": -1, "cpu_period": 0}),
    testing.container(
        name="b" * 300,
        envs={"NOTE": "", "EXCLUSIVE_CPUS": "\udcff", "": "="},
        mounts=(Mount("/run/topoproxy/", "/x"), Mount("relative", "")),
    ),
)


def battery(name: str) -> Iterator[Any]:
    """Events of a point, from usual to invalid ones."""
    plain = testing.event(name)
    fields = {field.name for field in dataclasses.fields(plain)}
    yield plain
    if name.startswith("validate_"):
        yield from (changed_copy(plain, event=each) for each in battery("pre_" + name[9:]))
        wanted = testing.Adjustment(
            cpus=CpuSet((2,)), cpu_quota=-1, oom_score_adj=testing.CLEAR, envs={"A": "b", "C": testing.CLEAR},
            labels={"l": "m"}, mounts={"/m": Mount("/m", "/h")}, cgroup_parent="/x",
            unified={"memory.high": "1"},
            updates={"c2": testing.Update(cpus=CpuSet((3,)), unified={"io.weight": "9"})},
        )  # fmt: skip
        yield changed_copy(plain, adjustment=wanted, owners={"cpus": "10-a", "envs[A]": "20-b"})
        return
    if "pod" in fields:
        yield from (changed_copy(plain, pod=pod) for pod in PODS)
    if "container" in fields:
        existing = {"id": plain.container.id, "phase": plain.container.phase}
        for container in CONTAINERS:
            yield changed_copy(plain, container=changed_copy(container, **existing))
    if "decision" in fields:
        for pod in PODS[:1] + PODS[-1:]:
            yield from (changed_copy(plain, pod=pod, decision=decision) for decision in DECISIONS)
    if "asked" in fields:
        yield changed_copy(plain, asked=Resources(), asked_annotations={"a": "b"})
    if name == "synchronize":
        all_of_it = [
            testing.running(f"c{n}", pod=PODS[n % len(PODS)], decision=decision)
            for n, decision in enumerate(DECISIONS * 3)
        ]
        yield changed_copy(plain, containers=all_of_it, pods=PODS)
        yield changed_copy(plain, containers=(), pods=(), pools=Pools())
    if name == "pools_changed":
        yield changed_copy(plain, before=plain.after, after=Pools())


class Watch:
    """Records which files the process changes."""

    changes = frozenset(
        ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.symlink", "os.truncate")
    )

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.on = False
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            path, _, flags = args
            if (
                isinstance(path, str | Path)
                and flags is not None
                and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            ):
                self.seen.append(str(path))
        elif event == "shutil.rmtree" or (event in self.changes and args[-1] in (-1, None)):
            # A path relative to a directory descriptor is a step of a removal that is recorded already.
            self.seen.extend(str(arg) for arg in args if isinstance(arg, str | Path))


@pytest.fixture(scope="module")
def runtime_events() -> Watch:
    """Add the audit hook once: an audit hook of a process cannot be removed."""
    return Watch()


@pytest.fixture
def watch(runtime_events: Watch) -> Iterator[Watch]:
    runtime_events.seen.clear()
    runtime_events.on = True
    yield runtime_events
    runtime_events.on = False


def in_directory(path: Path, directory: Path) -> testing.Loaded:
    """Load a hook with all paths of its settings below a directory."""
    plain = load_file(path, trusted=False)
    settings = getattr(plain.module, "Settings", None)
    keys = keys_of(settings) if settings is not None else []
    paths = {
        k.name: str(directory / k.name) for k in keys if isinstance(k.default, str) and k.default[:1] == "/"
    }
    return testing.load(path, paths or None)


def test_the_directory_has_hooks_and_is_no_package() -> None:
    assert len(FILES) > 5
    assert {path.name for path in DIRECTORY.iterdir()} - {"__pycache__"} == {path.name for path in FILES}


@HOOKS
def test_a_shipped_hook_loads_with_its_defaults_and_is_documented(path: Path) -> None:
    loaded = load_file(path, trusted=False)
    number, _, name = path.stem.partition("-")
    assert len(number) == 2
    assert number.isdigit()
    assert name
    assert loaded.module is not None
    first, _, rest = (loaded.module.__doc__ or "").partition("\n")
    assert first.endswith("."), "the first line is a sentence"
    assert len(rest) > 100, "the docstring explains the hook"
    for handler in loaded.hook.handlers.values():
        assert handler.__doc__, f"{handler.__name__} has no docstring"
    settings = getattr(loaded.module, "Settings", None)
    for key in keys_of(settings) if settings is not None else []:
        assert key.help.strip().endswith("."), f"{key.name} is explained"
        assert not key.required, f"{key.name} has a default"


@HOOKS
def test_a_shipped_hook_answers_all_events_and_writes_only_if_configured(
    path: Path, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The bytecode of a module that only this hook imports is not a file of the hook.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    hook = in_directory(path, tmp_path)
    for name in sorted(hook.hook.handlers, key=list(POINTS).index):
        if name == "configure":
            continue
        for event in battery(name):
            first = testing.run(hook, event)  # raises AssertionError on a failure of the hook or its deadline
            assert testing.run(hook, event) == first, "the same event, the same answer"
    outside = [seen for seen in watch.seen if not seen.startswith((str(tmp_path), "/dev/null"))]
    assert outside == []


@HOOKS
def test_a_shipped_hook_without_settings_changes_nothing(path: Path, tmp_path: Path) -> None:
    hook = in_directory(path, tmp_path)
    plain = testing.event(
        "pre_create_container", pod=testing.pod(qos="LS"), decision=testing.decision("shared", "0-1", "0")
    )
    assert testing.run(hook, plain) == testing.Outcome()


def test_all_shipped_hooks_run_without_conflicts(tmp_path: Path) -> None:
    hooks = [in_directory(path, tmp_path) for path in FILES]
    pod = testing.pod(
        qos="LSR",
        annotations={"irq-load-balancing.crio.io": "housekeeping", "example.com/note": "hello"},
    )
    outcome = testing.run(
        hooks, testing.event("pre_create_container", pod=pod, decision=testing.decision(unlimited=False))
    )
    assert set(outcome.owners.values()) == {path.stem for path in FILES} - {"40-irq-affinity", "90-differ"}
    assert outcome.refusal == ""


def test_allowed_memory_is_never_widened(tmp_path: Path) -> None:
    for path in FILES:
        event = testing.event("pre_create_container", decision=testing.decision("own", "2", "1"))
        adjustment = testing.run(in_directory(path, tmp_path), event).adjustment
        assert adjustment.mems in (testing.LEAVE, Mask((1,)))
        assert adjustment.cpus in (testing.LEAVE, CpuSet((2,)))


def test_the_watch_records_changed_files(tmp_path: Path, watch: Watch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").write_text("c")
    (tmp_path / "a/b").rename(tmp_path / "d")
    (tmp_path / "d").read_text()
    assert watch.seen == [str(tmp_path / name) for name in ("a", "a/b", "a/b", "d")]
