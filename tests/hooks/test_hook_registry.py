"""Hooks that are added, changed and removed while the daemon runs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from proxy.config import parse
from proxy.config.hooks import HooksConfig
from proxy.hooks import registry
from proxy.hooks.events import Point, PostRunPodSandbox, Synchronize
from proxy.hooks.facts import PodFacts, Pools
from proxy.hooks.hook import Hook
from proxy.hooks.loader.directories import HookFileEntry, HookFileScan, HookFileState, scan_directories
from proxy.hooks.loader.safe_read import SETTLED_S
from proxy.hooks.registry import SHORT_POLL_S, HookRegistry
from proxy.model.backoff import Backoff
from proxy.model.machine import Machine
from tests.testkit.captured_log import reasons, report
from tests.testkit.waiting import until

HEAD = "from proxy.hooks.api import *\nAPI_VERSION = 1\nlog = []\n"
WAIT_S = 30.0
EVENT = PostRunPodSandbox(PodFacts(name="p"))


def hook(answer: str, more: str = "") -> str:
    return f"{HEAD}def post_run_pod_sandbox(event): return {answer!r}\n{more}"


class Engine:
    """Calls hooks at once, and records the order of the calls."""

    def __init__(self) -> None:
        self.hooks: list[Hook] = []
        self.record: list[str] = []
        self.expected: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}

    def use(self, hooks: Sequence[Hook]) -> None:
        self.hooks = list(hooks)
        self.record.append(f"use {' '.join(self.answers())}".strip())

    def begin_notifying(self, hook: Hook) -> None:
        self.expected.append(hook.name)

    async def notify_one(self, hook: Hook, event: Point) -> object:
        handler = hook.handlers.get(event.NAME)
        if handler is None:
            return None
        detail = getattr(event, "reason", "") or hook.name
        origin = "server" if hook.remote else hook.handlers["post_run_pod_sandbox"](EVENT)
        self.record.append(f"{event.NAME} {detail} ({origin})")
        if gate := self.gates.get(event.NAME):
            await gate.wait()
        try:
            handler(event)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def answers(self) -> list[str]:
        return [h.handlers["post_run_pod_sandbox"](EVENT) for h in self.hooks if not h.remote]

    def names(self) -> list[str]:
        return [h.name for h in self.hooks]


class Setup:
    """Hook directories, an engine, and the registry that connects them."""

    def __init__(self, root: Path, settings: str = "") -> None:
        self.etc, self.usr, self.servers = (root / name for name in ("etc", "usr", "servers"))
        for directory in (self.etc, self.usr, self.servers):
            directory.mkdir(mode=0o755, exist_ok=True)
        paths = f"directory: {self.etc}, vendorDirectory: {self.usr}, serverDirectory: {self.servers}"
        self.config: HooksConfig = parse(f"hooks: {{{paths}, {settings}}}", "f").hooks
        self.engine = Engine()
        self.now = 0.0
        self.reported: list[str] = []
        self.logged: list[str] = []
        self.resolved: list[tuple[str, object]] = []
        self.everything: Callable[[], Synchronize | None] = lambda: None
        self.registry = HookRegistry(
            self.config,
            self.engine,
            lambda: self.everything(),
            reasons(self.reported),
            report(self.logged),
            lambda message, /, **keys: self.resolved.append((message, keys["hook"])),
        )

    def write(self, name: str, text: str, directory: Path | None = None) -> Path:
        """Write a file under another name and rename it."""
        path = (directory or self.etc) / name
        new = path.with_name(f".{name}.new")
        new.write_text(text)
        new.chmod(0o644)
        new.rename(path)
        return path

    async def scan_settled(self) -> None:
        """Scan after the time in which a file counts as being written."""
        await asyncio.sleep(SETTLED_S + 0.05)
        await self.registry.scan_once()

    def entry(self, name: str) -> HookFileEntry:
        return next(entry for entry in self.registry.entries if entry.name == name)

    def states(self) -> dict[str, str]:
        return {entry.name: str(entry.state) for entry in self.registry.entries}

    until = staticmethod(until)


@asynccontextmanager
async def running(setup: Setup) -> AsyncIterator[None]:
    task = asyncio.create_task(setup.registry.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await setup.registry.close()


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    before = set(sys.modules)
    asyncio.run(scenario())
    assert not [name for name in set(sys.modules) - before if "topoproxy_hooks" in name]


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def test_added_changed_and_removed_files_are_noticed_soon(setup: Setup) -> None:
    async def scenario() -> None:
        async with running(setup):
            durations = []
            for text, expected in (("one", ["one"]), ("two", ["two"]), (None, [])):
                began = time.monotonic()
                if text is None:
                    (setup.etc / "10-a.py").unlink()
                else:
                    setup.write("10-a.py", hook(text))
                await setup.until(lambda e=expected: setup.engine.answers() == e)  # type: ignore[misc]
                durations.append(time.monotonic() - began)
            assert min(durations) < 1
            assert setup.registry.entries == []

    play(scenario)


def test_the_first_scan_waits_for_a_recent_file_but_not_for_a_slow_writer(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.hooks.registry.REPORT_AFTER_S", 0.5)

    async def scenario() -> None:
        setup.write("10-a.py", hook("one"))
        await setup.registry.scan_once(WAIT_S)
        assert setup.engine.answers() == ["one"]
        with setup.write("20-b.py", hook("two")).open("a"):
            setup.write("30-c.py", hook("three"))
            await setup.registry.scan_once(WAIT_S)
            assert setup.engine.answers() == ["one", "three"]
            assert setup.states()["20-b"] == "being read"
        await setup.scan_settled()
        assert setup.engine.answers() == ["one", "two", "three"]
        await setup.registry.close()

    play(scenario)


def test_directories_may_be_created_later(setup: Setup) -> None:
    async def scenario() -> None:
        setup.etc.rmdir()
        async with running(setup):
            await asyncio.sleep(0.1)
            setup.etc.mkdir(mode=0o755)
            setup.write("10-a.py", hook("one"))
            await setup.until(lambda: setup.engine.answers() == ["one"])
        assert setup.reported == []

    play(scenario)


def test_hooks_are_used_in_the_order_of_their_names(setup: Setup) -> None:
    async def scenario() -> None:
        setup.write("50-b.py", hook("50"))
        setup.write("05-c.py", hook("05"), setup.usr)
        setup.write("10-d.py", hook("10"))
        setup.write("10-d.py", hook("masked"), setup.usr)
        await setup.scan_settled()
        assert setup.engine.answers() == ["05", "10", "50"]
        masked = [entry for entry in setup.registry.entries if entry.state is HookFileState.MASKED]
        assert [(e.name, e.path, e.error) for e in masked] == [
            ("10-d", f"{setup.usr}/10-d.py", f"{setup.etc}/10-d.py is used instead")
        ]
        (setup.etc / "10-d.py").unlink()
        await setup.scan_settled()
        assert setup.engine.answers() == ["05", "masked", "50"]
        await setup.registry.close()

    play(scenario)


LIFE = (
    "def configure(event): pass\ndef synchronize(event): assert event.pods\n"
    "def shutdown(event): log.append(event.reason)\n"
)


def test_a_new_version_is_ready_before_the_previous_one_ends(setup: Setup) -> None:
    async def scenario() -> None:
        machine = Machine.__new__(Machine)
        setup.everything = lambda: Synchronize(machine, Pools(), [PodFacts()])
        setup.write("10-a.py", hook("one", LIFE))
        await setup.scan_settled()
        setup.write("10-a.py", hook("two", LIFE))
        await setup.scan_settled()
        (setup.etc / "10-a.py").unlink()
        await setup.scan_settled()
        setup.write("10-a.py", hook("three", LIFE))
        await setup.scan_settled()
        await setup.registry.close()
        assert setup.engine.record == [
            "configure 10-a (one)", "synchronize 10-a (one)", "use one",
            "configure 10-a (two)", "synchronize 10-a (two)", "use two", "shutdown replaced (one)",
            "use", "shutdown removed (two)",
            "configure 10-a (three)", "synchronize 10-a (three)", "use three",
            "use", "shutdown stop (three)",
        ]  # fmt: skip
        assert setup.reported == []

    play(scenario)


def test_hooks_are_synchronized_only_once_the_state_is_known(setup: Setup) -> None:
    async def scenario() -> None:
        setup.write("10-a.py", hook("one", LIFE))
        await setup.scan_settled()
        assert setup.engine.record == ["configure 10-a (one)", "use one"]
        assert setup.engine.expected == ["10-a"], "the state may be known before the hook is in use"
        setup.everything = lambda: 1 / 0  # type: ignore[assignment,return-value]
        setup.write("20-a.py", hook("deaf"))
        await setup.scan_settled()
        assert setup.reported == []
        (setup.etc / "20-a.py").unlink()
        setup.write("20-b.py", hook("two", LIFE))
        await setup.scan_settled()
        assert setup.engine.answers() == ["one", "two"]
        assert setup.reported == ["ZeroDivisionError: division by zero"]
        await setup.registry.close()

    play(scenario)


def test_a_hook_that_fails_to_synchronize_or_shut_down_is_only_reported(setup: Setup) -> None:
    async def scenario() -> None:
        setup.everything = lambda: Synchronize(Machine.__new__(Machine), Pools())
        more = "def synchronize(event): raise ValueError('s')\ndef shutdown(event): raise ValueError('e')\n"
        path = setup.write("10-a.py", hook("one", more))
        await setup.scan_settled()
        assert setup.engine.answers() == ["one"]
        assert setup.reported == ["ValueError: s"]
        path.unlink()
        await setup.scan_settled()
        assert setup.reported[1:] == ["ValueError: e"]
        await setup.registry.close()

    play(scenario)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def x(:\n", "cannot load hook {}: SyntaxError: invalid syntax (line 1)"),
        (f"{HEAD}raise OSError('no')\n", "cannot load hook {}: OSError: no (line 4)"),
        (
            hook("x", "def configure(event): raise ValueError('no')\n"),
            "cannot configure hook {}: ValueError: no",
        ),
    ],
)
def test_a_broken_version_keeps_the_previous_one_until_it_is_fixed(
    setup: Setup, text: str, message: str
) -> None:
    async def scenario() -> None:
        path = setup.write("10-a.py", hook("one"))
        setup.write("20-b.py", text)
        await setup.scan_settled()
        other = message.format(setup.etc / "20-b.py")
        assert setup.engine.answers() == ["one"]
        assert setup.entry("20-b") == HookFileEntry(
            "20-b", f"{setup.etc}/20-b.py", HookFileState.BROKEN, other
        )
        assert setup.reported == [other]
        setup.reported.clear()
        setup.write("10-a.py", text)
        for _ in range(3):
            await setup.scan_settled()
        assert setup.engine.answers() == ["one"]
        entry = setup.entry("10-a")
        assert (entry.state, entry.error) == (HookFileState.OLD, message.format(path))
        assert (entry.points, entry.policy, entry.timeout) == (("post_run_pod_sandbox",), "Ignore", 0.5)
        assert setup.reported == [message.format(path)]
        setup.write("10-a.py", hook("two"))
        await setup.scan_settled()
        assert setup.engine.answers() == ["two"]
        assert (setup.entry("10-a").state, setup.entry("10-a").error) == (HookFileState.RUNNING, "")
        await setup.registry.close()

    play(scenario)


def test_a_restored_version_continues_without_a_reload(setup: Setup) -> None:
    async def scenario() -> None:
        path = setup.write("10-a.py", hook("one", LIFE))
        await setup.scan_settled()
        path.chmod(0o666)
        await setup.scan_settled()
        message = f"can be written by its group and others (mode 0666): chmod go-w {path}"
        lack = f"cannot trust hook {path}: {path} {message}"
        assert setup.reported == [lack]
        assert (setup.entry("10-a").state, setup.entry("10-a").error) == (HookFileState.OLD, lack)
        path.chmod(0o644)
        await setup.scan_settled()
        assert (setup.entry("10-a").state, setup.entry("10-a").error) == (HookFileState.RUNNING, "")
        assert setup.engine.record == ["configure 10-a (one)", "use one"]
        await setup.registry.close()

    play(scenario)


def test_an_untrusted_file_is_not_run_until_it_is_trusted(setup: Setup, tmp_path: Path) -> None:
    async def scenario() -> None:
        marker = tmp_path / "ran"
        setup.write("10-a.py", f"open({str(marker)!r}, 'w').close()\n" + hook("one"))
        setup.etc.chmod(0o775)
        await setup.scan_settled()
        assert not marker.exists()
        assert setup.states() == {"10-a": "untrusted"}
        message = f"the directory {setup.etc} can be written by its group (mode 0775): chmod g-w {setup.etc}"
        assert setup.reported == [f"cannot trust hook {setup.etc}/10-a.py: {message}"]
        setup.etc.chmod(0o755)
        await setup.scan_settled()
        assert setup.engine.answers() == ["one"]
        await setup.registry.close()

    play(scenario)


def test_an_empty_file_and_a_link_to_dev_null_disable(setup: Setup) -> None:
    async def scenario() -> None:
        for name in ("10-a.py", "20-b.py", "30-c.py"):
            setup.write(name, hook(name, LIFE), setup.usr)
        await setup.scan_settled()
        setup.write("10-a.py", "")
        (setup.etc / "20-b.py").symlink_to("/dev/null")
        await setup.scan_settled()
        assert setup.engine.answers() == ["30-c.py"]
        files = [(e.name, str(e.state)) for e in setup.registry.entries]
        assert files == [
            ("10-a", "disabled"), ("10-a", "masked"), ("20-b", "disabled"), ("20-b", "masked"),
            ("30-c", "running"),
        ]  # fmt: skip
        assert setup.engine.record[-1].startswith("shutdown removed")
        assert setup.reported == []
        (setup.etc / "10-a.py").unlink()
        (setup.etc / "20-b.py").unlink()
        await setup.scan_settled()
        assert setup.engine.answers() == ["10-a.py", "20-b.py", "30-c.py"]
        await setup.registry.close()

    play(scenario)


def test_a_file_is_not_loaded_while_it_is_written(setup: Setup) -> None:
    async def scenario() -> None:
        setup.write("10-a.py", hook("one"))
        await setup.scan_settled()
        async with running(setup):
            text = hook("two")
            with (setup.etc / "10-a.py").open("w") as stream:  # the file is empty for a moment
                for at in range(0, len(text), 20):
                    stream.write(text[at : at + 20])
                    stream.flush()
                    await asyncio.sleep(0.1)
                await asyncio.sleep(0.5)
                assert setup.engine.answers() == ["one"]
                await setup.until(lambda: setup.reported != [])
                message = f"cannot read hook {setup.etc}/10-a.py: another process has it open for writing"
                assert setup.reported == [message]
                assert setup.entry("10-a").error == message
            await setup.until(lambda: setup.engine.answers() == ["two"])
            assert setup.reported == [message]
            assert setup.entry("10-a").error == ""

    play(scenario)


@pytest.mark.parametrize("repaired", [hook("two"), "", None])
def test_the_problems_of_a_file_end_when_it_is_repaired_disabled_or_removed(
    setup: Setup, repaired: str | None
) -> None:
    problems = [
        ("cannot load a hook", "10-a"),
        ("cannot load a hook: its last version stays in use", "10-a"),
    ]

    async def scenario() -> None:
        setup.write("10-a.py", "def (")
        await setup.scan_settled()
        assert len(setup.reported) == 1
        assert setup.resolved == []
        if repaired is None:
            (setup.etc / "10-a.py").unlink()
        else:
            setup.write("10-a.py", repaired)
        await setup.scan_settled()
        assert setup.resolved == problems
        await setup.registry.close()

    play(scenario)


def test_a_file_that_is_written_slowly_a_second_time_is_reported_again(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.hooks.registry.REPORT_AFTER_S", 0.2)

    def is_reported(times: int) -> bool:
        return len(setup.reported) == times

    def answers(text: str) -> bool:
        return setup.engine.answers() == [text]

    async def scenario() -> None:
        async with running(setup):
            for times, text in enumerate(("one", "two"), 1):
                with setup.write("10-a.py", hook(text)).open("a"):
                    await setup.until(partial(is_reported, times))
                await setup.until(partial(answers, text))
            assert setup.reported[0] == setup.reported[1]

    play(scenario)


def test_a_file_that_hangs_does_not_block_other_files(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.hooks.loader.versions.LOAD_TIMEOUT_S", 2.0)

    async def scenario() -> None:
        path = setup.write("10-a.py", "import time\nwhile True: time.sleep(0.01)\n")
        async with running(setup):
            await setup.until(lambda: setup.states() == {"10-a": "being read"})
            setup.write("20-b.py", hook("b"))
            await setup.until(lambda: setup.engine.answers() == ["b"])
            assert setup.reported == []
            await setup.until(lambda: setup.reported != [])
            assert setup.reported == [
                f"cannot load hook {path}: it has not finished loading after 2 s (line 2)"
            ]
            assert setup.states() == {"10-a": "broken", "20-b": "running"}
            setup.write("10-a.py", hook("a"))
            await setup.until(lambda: setup.engine.answers() == ["a", "b"])

    play(scenario)


def test_a_hook_that_hangs_in_configure_does_not_block_other_hooks(setup: Setup) -> None:
    async def scenario() -> None:
        gate = setup.engine.gates["configure"] = asyncio.Event()
        setup.write("10-a.py", hook("a", "def configure(event): pass\n"))
        async with running(setup):
            await setup.until(lambda: setup.engine.record != [])
            setup.write("20-b.py", hook("b"))
            setup.write("10-a.py", hook("newer", "def configure(event): pass\n"))
            await setup.until(lambda: setup.engine.answers() == ["b"])
            for _ in range(3):  # one version at a time, for any number of scans
                await setup.registry._scan()
            assert setup.engine.record == ["configure 10-a (a)", "use b"]
            gate.set()
            await setup.until(lambda: setup.engine.answers() == ["newer", "b"])

    play(scenario)


def test_temporary_failures_are_retried_with_backoff(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "RETRY_DELAYS", Backoff(5.0, 11.0))
    setup.registry = HookRegistry(
        setup.config, setup.engine, lambda: None, reasons(setup.reported), clock=lambda: setup.now
    )
    lacks = f"__import__('os').stat({str(tmp_path / 'there')!r})"
    setup.write("10-loads.py", hook("loads", lacks))
    setup.write("20-configures.py", hook("configures", f"def configure(event): {lacks}"))
    setup.write("30-wrong.py", hook("wrong", "1 / 0"))

    async def scenario() -> None:
        tried = []
        await setup.scan_settled()
        for _ in range(36):
            setup.now += 1
            before = len(setup.reported)
            await setup.registry.scan_once(0)
            while setup.registry._tasks:
                await asyncio.sleep(0.005)
            if len(setup.reported) > before:
                tried.append((setup.now, len(setup.reported) - before))
        assert tried == [(5, 2), (15, 2), (26, 2)]
        (tmp_path / "there").touch()
        setup.now += 11
        await setup.scan_settled()
        assert setup.engine.answers() == ["loads", "configures"]
        assert setup.states() == {"10-loads": "running", "20-configures": "running", "30-wrong": "broken"}
        setup.now += 1000
        before = len(setup.reported)
        await setup.scan_settled()
        assert len(setup.reported) == before

    asyncio.run(scenario())


def test_a_hook_is_checked_again_as_soon_as_it_is_in_use(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file may have changed meanwhile."""
    monkeypatch.setattr("proxy.hooks.registry.POLL_S", 3600.0)

    async def scenario() -> None:
        gate = setup.engine.gates["configure"] = asyncio.Event()
        setup.write("10-a.py", hook("a", "def configure(event): pass\n"))
        await asyncio.sleep(SETTLED_S + 0.05)
        async with running(setup):
            await setup.until(lambda: setup.engine.record != [])
            setup.write("10-a.py", hook("newer"))
            await asyncio.sleep(SETTLED_S + 0.05)
            gate.set()
            await setup.until(lambda: setup.engine.answers() == ["newer"])

    play(scenario)


def test_a_removed_hook_is_checked_again_at_once(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file may exist again."""
    monkeypatch.setattr("proxy.hooks.registry.POLL_S", 3600.0)

    async def scenario() -> None:
        path = setup.write("10-a.py", hook("a", "def shutdown(event): pass\n"))
        await setup.scan_settled()
        gate = setup.engine.gates["shutdown"] = asyncio.Event()
        path.unlink()
        async with running(setup):
            await setup.until(lambda: "shutdown removed (a)" in setup.engine.record)
            setup.write("10-a.py", hook("again"))
            await asyncio.sleep(SETTLED_S + 0.05)
            gate.set()
            await setup.until(lambda: setup.engine.answers() == ["again"])

    play(scenario)


def test_a_file_that_is_being_written_is_checked_at_intervals(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans: list[float] = []

    def watched(config: HooksConfig) -> Any:
        scans.append(time.monotonic())
        return scan_directories(config)

    async def scenario() -> None:
        monkeypatch.setattr("proxy.hooks.registry.scan_directories", watched)
        with setup.write("10-a.py", hook("a")).open("a"):
            async with running(setup):
                await setup.until(lambda: len(scans) > 4)
                assert min(b - a for a, b in pairwise(scans)) > SHORT_POLL_S / 2

    play(scenario)


def test_settings_of_missing_hooks_are_reported_once(tmp_path: Path) -> None:
    text = (
        f"from dataclasses import dataclass\n{hook('x')}"
        "@dataclass\nclass Settings:\n    word: str = ''\n"
        "WORD = ''\ndef configure(event):\n    global WORD\n    WORD = event.settings.word + event.name\n"
        "def post_run_pod_sandbox(event): return WORD\n"
    )
    setup = Setup(
        tmp_path, "settings: {10-a: {config: {word: it-is-}}, 10-b: {}, koordlet: {config: {a: 1}}}"
    )

    async def scenario() -> None:
        setup.write("10-a.py", text)
        setup.write("koordlet.json", "{", setup.servers)
        for _ in range(3):
            await setup.scan_settled()
        assert setup.engine.answers() == ["it-is-10-a"]
        assert [text for text in setup.reported if "hooks.settings" in text] == [
            "hooks.settings.10-b: there is no such hook; did you mean 10-a?",
            "hooks.settings.koordlet.config: it is a server, which is configured elsewhere",
        ]
        await setup.registry.close()

    play(scenario)


SERVER = {"remote-endpoint": "/nowhere/koordlet.sock", "runtime-hooks": ["PreCreateContainer"]}


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"remote-endpoint": 5}', "\0", "{" * 100_000])
def test_servers_are_added_and_an_invalid_file_affects_no_other(setup: Setup, text: str) -> None:
    """Koordinator's proxy crashes on an invalid file."""

    async def scenario() -> None:
        setup.write("10-a.py", hook("a"))
        path = setup.write("koordlet.json", text, setup.servers)
        await setup.scan_settled()
        assert setup.engine.names() == ["10-a"]
        assert setup.states() == {"10-a": "running", "koordlet": "broken"}
        assert len(setup.reported) == 1
        assert str(path) in setup.reported[0]
        setup.write("koordlet.json", json.dumps(SERVER), setup.servers)
        await setup.scan_settled()
        assert setup.engine.names() == ["10-a", "koordlet"]
        entry = setup.entry("koordlet")
        assert (entry.state, entry.server, "pre_create_container" in entry.points) == (
            HookFileState.RUNNING,
            True,
            True,
        )
        setup.write("koordlet.json", text, setup.servers)
        await setup.scan_settled()
        assert setup.engine.names() == ["10-a", "koordlet"]
        assert setup.states()["koordlet"] == "old version running"
        path.unlink()
        await setup.scan_settled()
        assert setup.engine.names() == ["10-a"]
        await setup.registry.close()

    play(scenario)


def test_a_server_file_that_is_written_in_two_steps_is_not_reported(setup: Setup) -> None:
    """koordlet truncates its file before it writes it."""

    async def scenario() -> None:
        async with running(setup):
            with (setup.servers / "koordlet.json").open("w") as stream:
                await asyncio.sleep(0.7)
                stream.write(json.dumps(SERVER))
            await setup.until(lambda: setup.engine.names() == ["koordlet"])
        assert setup.reported == []

    play(scenario)


def test_hooks_of_a_directory_that_cannot_be_listed_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(tmp_path, "settings: {10-a: {timeout: 1s}}")

    async def scenario() -> None:
        setup.write("10-a.py", hook("a"))
        setup.write("20-b.py", hook("b"), setup.usr)
        await setup.scan_settled()
        listed = os.listdir

        def refuse(path: Path) -> list[str]:
            if path == setup.etc:
                raise OSError(5, "Input/output error")
            return listed(path)

        monkeypatch.setattr("proxy.hooks.loader.directories.os.listdir", refuse)
        (setup.usr / "20-b.py").unlink()
        await setup.scan_settled()
        assert setup.engine.answers() == ["a"]
        assert setup.reported == [f"cannot look for hooks in {setup.etc}: Input/output error"]
        await setup.registry.close()

    play(scenario)


def test_an_internal_error_does_not_affect_other_hooks(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        setup.write("10-a.py", hook("a"))
        await setup.scan_settled()
        monkeypatch.setattr("proxy.hooks.loader.versions.read", lambda *_: 1 / 0)
        path = setup.write("10-a.py", hook("b"))
        await setup.scan_settled()
        assert setup.engine.answers() == ["a"]
        cause = "ZeroDivisionError: division by zero"
        assert setup.reported == [f"cannot bring hook {path} into use: {cause}"]
        assert setup.registry._records["10-a"].retry_at is not None, "it is tried again"
        monkeypatch.setattr("proxy.hooks.registry.scan_directories", lambda *_: 1 / 0)
        async with running(setup):
            await setup.until(lambda: len(setup.reported) > 1)
            assert setup.reported[1] == "ZeroDivisionError: division by zero"
            assert setup.engine.answers() == ["a"]

    play(scenario)


@pytest.mark.parametrize(("cpu_seconds", "scans"), [(0.0, range(3, 20)), (0.1, range(1, 2))])
def test_scans_that_cost_much_are_rare(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, cpu_seconds: float, scans: range
) -> None:
    """A scan of thousands of files takes a tenth of a second of CPU and more."""
    made = []

    def costly(config: HooksConfig) -> HookFileScan:
        made.append(scan_directories(config))
        made[-1].cpu_seconds = cpu_seconds
        return made[-1]

    monkeypatch.setattr("proxy.hooks.registry.scan_directories", costly)
    monkeypatch.setattr("proxy.hooks.registry.POLL_S", 0.2)

    async def scenario() -> None:
        async with running(setup):
            await asyncio.sleep(1.5)
        assert len(made) in scans

    play(scenario)


def test_a_scan_can_be_cancelled_while_a_hook_comes_into_use(setup: Setup) -> None:
    async def scenario() -> None:
        task = asyncio.create_task(setup.registry.run())
        await asyncio.sleep(0.2)
        setup.registry._wake.set()
        await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=WAIT_S)
        assert done
        assert task.cancelled()
        await setup.registry.close()

    play(scenario)


def test_closing_waits_for_hooks_for_a_limited_time(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.hooks.registry.STOP_TIMEOUT_S", 0.1)

    async def scenario() -> None:
        setup.engine.gates["configure"] = asyncio.Event()
        setup.write("10-a.py", hook("a", "def configure(event): pass\n"))
        await asyncio.sleep(SETTLED_S + 0.05)
        await setup.registry.scan_once(timeout=0.1)
        assert setup.engine.record == ["configure 10-a (a)"]
        await setup.registry.close()
        assert setup.engine.answers() == []

    asyncio.run(scenario())


def test_loaded_and_removed_hooks_are_logged(setup: Setup) -> None:
    async def scenario() -> None:
        path = setup.write("10-a.py", hook("a"))
        await setup.scan_settled()
        path.unlink()
        await setup.scan_settled()
        assert setup.logged == [f"hook loaded hook=10-a path={path}", "hook unloaded hook=10-a"]
        await setup.registry.close()

    play(scenario)


def test_the_real_engine_follows_the_files(setup: Setup) -> None:
    from proxy.hooks.answers import Adjustment
    from proxy.hooks.engine.engine import HookEngine as Real
    from proxy.hooks.events import PreCreateContainer
    from proxy.hooks.facts import ContainerFacts, Decision

    def text(word: str) -> str:
        return (
            f"{HEAD}def configure(event): log.append(event.name)\n"
            f"def pre_create_container(event): return Adjustment(envs={{'WORD': {word!r} + str(log)}})\n"
        )

    async def scenario() -> None:
        engine = Real(reasons(setup.reported), lambda *_: None)
        hook_registry = HookRegistry(setup.config, engine, lambda: None, reasons(setup.reported))
        setup.registry = hook_registry

        async def call_engine() -> Any:
            answers = engine.call_hooks(PreCreateContainer(PodFacts(), ContainerFacts(), Decision()))
            return answers.outcome or await answers.wait()

        for word in ("one", "two"):
            setup.write("10-a.py", text(word))
            await setup.scan_settled()
            outcome = await call_engine()
            assert outcome.adjustment == Adjustment(envs={"WORD": f"{word}['10-a']"})
            assert outcome.owners == {"envs[WORD]": "10-a"}
        setup.write("10-a.py", f"{HEAD}def configure(event): raise ValueError('no')\n")
        await setup.scan_settled()
        assert "ValueError: no" in hook_registry.entries[0].error
        assert (await call_engine()).adjustment.envs == {"WORD": "two['10-a']"}
        (setup.etc / "10-a.py").unlink()
        await setup.scan_settled()
        assert engine.points == frozenset()
        await hook_registry.close()
        engine.close()

    play(scenario)
