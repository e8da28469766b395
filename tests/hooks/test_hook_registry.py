"""Hooks that come, change and go while the daemon runs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
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
from proxy.hooks.loader.directories import HookFileEntry, State, survey
from proxy.hooks.loader.safe_read import SETTLED_S
from proxy.hooks.registry import SOON_S, HookRegistry
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
    """Asks at once, and remembers the order of all."""

    def __init__(self) -> None:
        self.hooks: list[Hook] = []
        self.story: list[str] = []
        self.expected: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}

    def use(self, hooks: Sequence[Hook]) -> None:
        self.hooks = list(hooks)
        self.story.append(f"use {' '.join(self.answers())}".strip())

    def expect(self, hook: Hook) -> None:
        self.expected.append(hook.name)

    async def notify_one(self, hook: Hook, event: Point) -> object:
        handler = hook.handlers.get(event.NAME)
        if handler is None:
            return None
        said = getattr(event, "reason", "") or hook.name
        origin = "server" if hook.remote else hook.handlers["post_run_pod_sandbox"](EVENT)
        self.story.append(f"{event.NAME} {said} ({origin})")
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


class Scene:
    """Directories, an engine and the library between them."""

    def __init__(self, root: Path, words: str = "") -> None:
        self.etc, self.usr, self.servers = (root / name for name in ("etc", "usr", "servers"))
        for directory in (self.etc, self.usr, self.servers):
            directory.mkdir(mode=0o755, exist_ok=True)
        given = f"folder: {self.etc}, vendorFolder: {self.usr}, serverFolder: {self.servers}"
        self.config: HooksConfig = parse(f"hooks: {{{given}, {words}}}", "f").hooks
        self.engine = Engine()
        self.now = 0.0
        self.reported: list[str] = []
        self.logged: list[str] = []
        self.everything: Callable[[], Synchronize | None] = lambda: None
        self.library = HookRegistry(
            self.config, self.engine, lambda: self.everything(), reasons(self.reported), report(self.logged)
        )

    def write(self, name: str, text: str, directory: Path | None = None) -> Path:
        """Write as careful people do."""
        path = (directory or self.etc) / name
        new = path.with_name(f".{name}.new")
        new.write_text(text)
        new.chmod(0o644)
        new.rename(path)
        return path

    async def look(self) -> None:
        """Look when all has settled."""
        await asyncio.sleep(SETTLED_S + 0.05)
        await self.library.look_once()

    def entry(self, name: str) -> HookFileEntry:
        return next(entry for entry in self.library.entries if entry.name == name)

    def states(self) -> dict[str, str]:
        return {entry.name: str(entry.state) for entry in self.library.entries}

    until = staticmethod(until)


@asynccontextmanager
async def running(scene: Scene) -> AsyncIterator[None]:
    task = asyncio.create_task(scene.library.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await scene.library.close()


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    before = set(sys.modules)
    asyncio.run(story())
    assert not [name for name in set(sys.modules) - before if "topoproxy_hooks" in name]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_files_come_change_and_go_within_a_moment(scene: Scene) -> None:
    async def story() -> None:
        async with running(scene):
            took = []
            for text, expected in (("one", ["one"]), ("two", ["two"]), (None, [])):
                began = time.monotonic()
                if text is None:
                    (scene.etc / "10-a.py").unlink()
                else:
                    scene.write("10-a.py", hook(text))
                await scene.until(lambda e=expected: scene.engine.answers() == e)  # type: ignore[misc]
                took.append(time.monotonic() - began)
            assert min(took) < 1
            assert scene.library.entries == []

    play(story)


def test_a_first_look_waits_for_a_recent_file_but_not_a_slow_writer(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.hooks.registry.PATIENCE_S", 0.5)

    async def story() -> None:
        scene.write("10-a.py", hook("one"))
        await scene.library.look_once(WAIT_S)
        assert scene.engine.answers() == ["one"]
        with scene.write("20-b.py", hook("two")).open("a"):
            scene.write("30-c.py", hook("three"))
            await scene.library.look_once(WAIT_S)
            assert scene.engine.answers() == ["one", "three"]
            assert scene.states()["20-b"] == "being read"
        await scene.look()
        assert scene.engine.answers() == ["one", "two", "three"]
        await scene.library.close()

    play(story)


def test_directories_may_come_later(scene: Scene) -> None:
    async def story() -> None:
        scene.etc.rmdir()
        async with running(scene):
            await asyncio.sleep(0.1)
            scene.etc.mkdir(mode=0o755)
            scene.write("10-a.py", hook("one"))
            await scene.until(lambda: scene.engine.answers() == ["one"])
        assert scene.reported == []

    play(story)


def test_all_are_used_in_the_order_of_their_names(scene: Scene) -> None:
    async def story() -> None:
        scene.write("50-b.py", hook("50"))
        scene.write("05-c.py", hook("05"), scene.usr)
        scene.write("10-d.py", hook("10"))
        scene.write("10-d.py", hook("masked"), scene.usr)
        await scene.look()
        assert scene.engine.answers() == ["05", "10", "50"]
        masked = [entry for entry in scene.library.entries if entry.state is State.MASKED]
        assert [(e.name, e.path, e.error) for e in masked] == [
            ("10-d", f"{scene.usr}/10-d.py", f"{scene.etc}/10-d.py is used instead")
        ]
        (scene.etc / "10-d.py").unlink()
        await scene.look()
        assert scene.engine.answers() == ["05", "masked", "50"]
        await scene.library.close()

    play(story)


LIFE = (
    "def configure(event): pass\ndef synchronize(event): assert event.pods\n"
    "def shutdown(event): log.append(event.reason)\n"
)


def test_a_new_version_is_ready_before_the_one_before_ends(scene: Scene) -> None:
    async def story() -> None:
        machine = Machine.__new__(Machine)
        scene.everything = lambda: Synchronize(machine, Pools(), [PodFacts()])
        scene.write("10-a.py", hook("one", LIFE))
        await scene.look()
        scene.write("10-a.py", hook("two", LIFE))
        await scene.look()
        (scene.etc / "10-a.py").unlink()
        await scene.look()
        scene.write("10-a.py", hook("three", LIFE))
        await scene.look()
        await scene.library.close()
        assert scene.engine.story == [
            "configure 10-a (one)", "synchronize 10-a (one)", "use one",
            "configure 10-a (two)", "synchronize 10-a (two)", "use two", "shutdown replaced (one)",
            "use", "shutdown removed (two)",
            "configure 10-a (three)", "synchronize 10-a (three)", "use three",
            "use", "shutdown stop (three)",
        ]  # fmt: skip
        assert scene.reported == []

    play(story)


def test_hooks_are_synchronized_only_once_the_state_is_known(scene: Scene) -> None:
    async def story() -> None:
        scene.write("10-a.py", hook("one", LIFE))
        await scene.look()
        assert scene.engine.story == ["configure 10-a (one)", "use one"]
        assert scene.engine.expected == ["10-a"], "the state may be known before it is in use"
        scene.everything = lambda: 1 / 0  # type: ignore[assignment,return-value]
        scene.write("20-a.py", hook("deaf"))
        await scene.look()
        assert scene.reported == []
        (scene.etc / "20-a.py").unlink()
        scene.write("20-b.py", hook("two", LIFE))
        await scene.look()
        assert scene.engine.answers() == ["one", "two"]
        assert scene.reported == ["ZeroDivisionError: division by zero"]
        await scene.library.close()

    play(story)


def test_a_hook_that_fails_to_synchronize_or_end_is_reported_only(scene: Scene) -> None:
    async def story() -> None:
        scene.everything = lambda: Synchronize(Machine.__new__(Machine), Pools())
        more = "def synchronize(event): raise ValueError('s')\ndef shutdown(event): raise ValueError('e')\n"
        path = scene.write("10-a.py", hook("one", more))
        await scene.look()
        assert scene.engine.answers() == ["one"]
        assert scene.reported == ["ValueError: s"]
        path.unlink()
        await scene.look()
        assert scene.reported[1:] == ["ValueError: e"]
        await scene.library.close()

    play(story)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def x(:\n", "cannot load hook {}: SyntaxError: invalid syntax (line 1)"),
        (f"{HEAD}raise OSError('no')\n", "cannot load hook {}: OSError: no (line 4)"),
        (
            hook("x", "def configure(event): raise ValueError('no')\n"),
            "cannot configure hook {}: ValueError: no",
        ),
    ],
)
def test_a_broken_version_leaves_the_one_before_until_it_is_mended(
    scene: Scene, text: str, words: str
) -> None:
    async def story() -> None:
        path = scene.write("10-a.py", hook("one"))
        scene.write("20-b.py", text)
        await scene.look()
        other = words.format(scene.etc / "20-b.py")
        assert scene.engine.answers() == ["one"]
        assert scene.entry("20-b") == HookFileEntry("20-b", f"{scene.etc}/20-b.py", State.BROKEN, other)
        assert scene.reported == [other]
        scene.reported.clear()
        scene.write("10-a.py", text)
        for _ in range(3):
            await scene.look()
        assert scene.engine.answers() == ["one"]
        entry = scene.entry("10-a")
        assert (entry.state, entry.error) == (State.OLD, words.format(path))
        assert (entry.points, entry.policy, entry.timeout) == (("post_run_pod_sandbox",), "Ignore", 0.5)
        assert scene.reported == [words.format(path)]
        scene.write("10-a.py", hook("two"))
        await scene.look()
        assert scene.engine.answers() == ["two"]
        assert (scene.entry("10-a").state, scene.entry("10-a").error) == (State.RUNNING, "")
        await scene.library.close()

    play(story)


def test_a_version_that_is_given_back_as_it_was_runs_on_as_it_is(scene: Scene) -> None:
    async def story() -> None:
        path = scene.write("10-a.py", hook("one", LIFE))
        await scene.look()
        path.chmod(0o666)
        await scene.look()
        words = f"can be written by its group and others (mode 0666): chmod go-w {path}"
        lack = f"cannot trust hook {path}: {path} {words}"
        assert scene.reported == [lack]
        assert (scene.entry("10-a").state, scene.entry("10-a").error) == (State.OLD, lack)
        path.chmod(0o644)
        await scene.look()
        assert (scene.entry("10-a").state, scene.entry("10-a").error) == (State.RUNNING, "")
        assert scene.engine.story == ["configure 10-a (one)", "use one"]
        await scene.library.close()

    play(story)


def test_what_cannot_be_trusted_is_not_run_until_it_can(scene: Scene, tmp_path: Path) -> None:
    async def story() -> None:
        marker = tmp_path / "ran"
        scene.write("10-a.py", f"open({str(marker)!r}, 'w').close()\n" + hook("one"))
        scene.etc.chmod(0o775)
        await scene.look()
        assert not marker.exists()
        assert scene.states() == {"10-a": "untrusted"}
        words = f"the directory {scene.etc} can be written by its group (mode 0775): chmod g-w {scene.etc}"
        assert scene.reported == [f"cannot trust hook {scene.etc}/10-a.py: {words}"]
        scene.etc.chmod(0o755)
        await scene.look()
        assert scene.engine.answers() == ["one"]
        await scene.library.close()

    play(story)


def test_an_empty_file_and_a_link_to_dev_null_disable(scene: Scene) -> None:
    async def story() -> None:
        for name in ("10-a.py", "20-b.py", "30-c.py"):
            scene.write(name, hook(name, LIFE), scene.usr)
        await scene.look()
        scene.write("10-a.py", "")
        (scene.etc / "20-b.py").symlink_to("/dev/null")
        await scene.look()
        assert scene.engine.answers() == ["30-c.py"]
        files = [(e.name, str(e.state)) for e in scene.library.entries]
        assert files == [
            ("10-a", "disabled"), ("10-a", "masked"), ("20-b", "disabled"), ("20-b", "masked"),
            ("30-c", "running"),
        ]  # fmt: skip
        assert scene.engine.story[-1].startswith("shutdown removed")
        assert scene.reported == []
        (scene.etc / "10-a.py").unlink()
        (scene.etc / "20-b.py").unlink()
        await scene.look()
        assert scene.engine.answers() == ["10-a.py", "20-b.py", "30-c.py"]
        await scene.library.close()

    play(story)


def test_a_file_is_not_taken_while_it_is_written(scene: Scene) -> None:
    async def story() -> None:
        scene.write("10-a.py", hook("one"))
        await scene.look()
        async with running(scene):
            text = hook("two")
            with (scene.etc / "10-a.py").open("w") as stream:  # for a moment it is empty
                for at in range(0, len(text), 20):
                    stream.write(text[at : at + 20])
                    stream.flush()
                    await asyncio.sleep(0.1)
                await asyncio.sleep(0.5)
                assert scene.engine.answers() == ["one"]
                await scene.until(lambda: scene.reported != [])
                words = f"cannot read hook {scene.etc}/10-a.py: another process has it open for writing"
                assert scene.reported == [words]
                assert scene.entry("10-a").error == words
            await scene.until(lambda: scene.engine.answers() == ["two"])
            assert scene.reported == [words]
            assert scene.entry("10-a").error == ""

    play(story)


def test_a_file_that_hangs_blocks_no_other(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.hooks.loader.versions.LOAD_S", 2.0)

    async def story() -> None:
        path = scene.write("10-a.py", "import time\nwhile True: time.sleep(0.01)\n")
        async with running(scene):
            await scene.until(lambda: scene.states() == {"10-a": "being read"})
            scene.write("20-b.py", hook("b"))
            await scene.until(lambda: scene.engine.answers() == ["b"])
            assert scene.reported == []
            await scene.until(lambda: scene.reported != [])
            assert scene.reported == [f"cannot load hook {path}: it is still not through after 2 s (line 2)"]
            assert scene.states() == {"10-a": "broken", "20-b": "running"}
            scene.write("10-a.py", hook("a"))
            await scene.until(lambda: scene.engine.answers() == ["a", "b"])

    play(story)


def test_a_hook_that_hangs_in_configure_blocks_no_other(scene: Scene) -> None:
    async def story() -> None:
        gate = scene.engine.gates["configure"] = asyncio.Event()
        scene.write("10-a.py", hook("a", "def configure(event): pass\n"))
        async with running(scene):
            await scene.until(lambda: scene.engine.story != [])
            scene.write("20-b.py", hook("b"))
            scene.write("10-a.py", hook("newer", "def configure(event): pass\n"))
            await scene.until(lambda: scene.engine.answers() == ["b"])
            for _ in range(3):  # one version at a time, however often it is looked at
                await scene.library._scan()
            assert scene.engine.story == ["configure 10-a (a)", "use b"]
            gate.set()
            await scene.until(lambda: scene.engine.answers() == ["newer", "b"])

    play(story)


def test_what_may_be_right_later_is_tried_again_ever_more_rarely(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "AGAIN", Backoff(5.0, 11.0))
    scene.library = HookRegistry(
        scene.config, scene.engine, lambda: None, reasons(scene.reported), clock=lambda: scene.now
    )
    lacks = f"__import__('os').stat({str(tmp_path / 'there')!r})"
    scene.write("10-loads.py", hook("loads", lacks))
    scene.write("20-configures.py", hook("configures", f"def configure(event): {lacks}"))
    scene.write("30-wrong.py", hook("wrong", "1 / 0"))

    async def story() -> None:
        tried = []
        await scene.look()
        for _ in range(36):
            scene.now += 1
            before = len(scene.reported)
            await scene.library.look_once(0)
            while scene.library._busy:
                await asyncio.sleep(0.005)
            if len(scene.reported) > before:
                tried.append((scene.now, len(scene.reported) - before))
        assert tried == [(5, 2), (15, 2), (26, 2)]
        (tmp_path / "there").touch()
        scene.now += 11
        await scene.look()
        assert scene.engine.answers() == ["loads", "configures"]
        assert scene.states() == {"10-loads": "running", "20-configures": "running", "30-wrong": "broken"}
        scene.now += 1000
        before = len(scene.reported)
        await scene.look()
        assert len(scene.reported) == before

    asyncio.run(story())


def test_a_hook_that_came_into_use_is_checked_at_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have changed meanwhile."""
    monkeypatch.setattr("proxy.hooks.registry.LOOK_S", 3600.0)

    async def story() -> None:
        gate = scene.engine.gates["configure"] = asyncio.Event()
        scene.write("10-a.py", hook("a", "def configure(event): pass\n"))
        await asyncio.sleep(SETTLED_S + 0.05)
        async with running(scene):
            await scene.until(lambda: scene.engine.story != [])
            scene.write("10-a.py", hook("newer"))
            await asyncio.sleep(SETTLED_S + 0.05)
            gate.set()
            await scene.until(lambda: scene.engine.answers() == ["newer"])

    play(story)


def test_a_hook_that_has_gone_is_checked_at_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be there again."""
    monkeypatch.setattr("proxy.hooks.registry.LOOK_S", 3600.0)

    async def story() -> None:
        path = scene.write("10-a.py", hook("a", "def shutdown(event): pass\n"))
        await scene.look()
        gate = scene.engine.gates["shutdown"] = asyncio.Event()
        path.unlink()
        async with running(scene):
            await scene.until(lambda: "shutdown removed (a)" in scene.engine.story)
            scene.write("10-a.py", hook("again"))
            await asyncio.sleep(SETTLED_S + 0.05)
            gate.set()
            await scene.until(lambda: scene.engine.answers() == ["again"])

    play(story)


def test_a_file_that_is_being_written_is_not_checked_all_the_time(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def watched(config: HooksConfig) -> Any:
        looks.append(time.monotonic())
        return survey(config)

    async def story() -> None:
        monkeypatch.setattr("proxy.hooks.registry.survey", watched)
        with scene.write("10-a.py", hook("a")).open("a"):
            async with running(scene):
                await scene.until(lambda: len(looks) > 4)
                assert min(b - a for a, b in pairwise(looks)) > SOON_S / 2

    play(story)


def test_settings_of_missing_hooks_are_reported_once(tmp_path: Path) -> None:
    text = (
        f"from dataclasses import dataclass\n{hook('x')}"
        "@dataclass\nclass Settings:\n    word: str = ''\n"
        "WORD = ''\ndef configure(event):\n    global WORD\n    WORD = event.settings.word + event.name\n"
        "def post_run_pod_sandbox(event): return WORD\n"
    )
    scene = Scene(
        tmp_path, "settings: {10-a: {config: {word: it-is-}}, 10-b: {}, koordlet: {config: {a: 1}}}"
    )

    async def story() -> None:
        scene.write("10-a.py", text)
        scene.write("koordlet.json", "{", scene.servers)
        for _ in range(3):
            await scene.look()
        assert scene.engine.answers() == ["it-is-10-a"]
        assert [words for words in scene.reported if "hooks.settings" in words] == [
            "hooks.settings.10-b: there is no such hook; did you mean 10-a?",
            "hooks.settings.koordlet.config: it is a server, which is configured elsewhere",
        ]
        await scene.library.close()

    play(story)


SERVER = {"remote-endpoint": "/nowhere/koordlet.sock", "runtime-hooks": ["PreCreateContainer"]}


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"remote-endpoint": 5}', "\0", "{" * 100_000])
def test_servers_are_added_and_an_invalid_file_breaks_no_other(scene: Scene, text: str) -> None:
    """The peer dies of an invalid file."""

    async def story() -> None:
        scene.write("10-a.py", hook("a"))
        path = scene.write("koordlet.json", text, scene.servers)
        await scene.look()
        assert scene.engine.names() == ["10-a"]
        assert scene.states() == {"10-a": "running", "koordlet": "broken"}
        assert len(scene.reported) == 1
        assert str(path) in scene.reported[0]
        scene.write("koordlet.json", json.dumps(SERVER), scene.servers)
        await scene.look()
        assert scene.engine.names() == ["10-a", "koordlet"]
        entry = scene.entry("koordlet")
        assert (entry.state, entry.server, "pre_create_container" in entry.points) == (
            State.RUNNING,
            True,
            True,
        )
        scene.write("koordlet.json", text, scene.servers)
        await scene.look()
        assert scene.engine.names() == ["10-a", "koordlet"]
        assert scene.states()["koordlet"] == "old version running"
        path.unlink()
        await scene.look()
        assert scene.engine.names() == ["10-a"]
        await scene.library.close()

    play(story)


def test_a_server_file_that_is_written_in_two_steps_is_not_reported(scene: Scene) -> None:
    """koordlet truncates its file and writes it then."""

    async def story() -> None:
        async with running(scene):
            with (scene.servers / "koordlet.json").open("w") as stream:
                await asyncio.sleep(0.7)
                stream.write(json.dumps(SERVER))
            await scene.until(lambda: scene.engine.names() == ["koordlet"])
        assert scene.reported == []

    play(story)


def test_what_cannot_be_listed_now_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, "settings: {10-a: {timeout: 1s}}")

    async def story() -> None:
        scene.write("10-a.py", hook("a"))
        scene.write("20-b.py", hook("b"), scene.usr)
        await scene.look()
        listed = os.listdir

        def refuse(path: Path) -> list[str]:
            if path == scene.etc:
                raise OSError(5, "Input/output error")
            return listed(path)

        monkeypatch.setattr("proxy.hooks.loader.directories.os.listdir", refuse)
        (scene.usr / "20-b.py").unlink()
        await scene.look()
        assert scene.engine.answers() == ["a"]
        assert scene.reported == [f"cannot look for hooks in {scene.etc}: Input/output error"]
        await scene.library.close()

    play(story)


def test_a_fault_of_our_own_leaves_the_others(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        scene.write("10-a.py", hook("a"))
        await scene.look()
        monkeypatch.setattr("proxy.hooks.loader.versions.read", lambda *_: 1 / 0)
        path = scene.write("10-a.py", hook("b"))
        await scene.look()
        assert scene.engine.answers() == ["a"]
        cause = "ZeroDivisionError: division by zero"
        assert scene.reported == [f"cannot bring hook {path} into use: {cause}"]
        assert scene.library._known["10-a"].again is not None, "it is tried again"
        monkeypatch.setattr("proxy.hooks.registry.survey", lambda *_: 1 / 0)
        async with running(scene):
            await scene.until(lambda: len(scene.reported) > 1)
            assert scene.reported[1] == "ZeroDivisionError: division by zero"
            assert scene.engine.answers() == ["a"]

    play(story)


def test_it_can_be_cancelled_as_a_hook_comes_into_use(scene: Scene) -> None:
    async def story() -> None:
        task = asyncio.create_task(scene.library.run())
        await asyncio.sleep(0.2)
        scene.library._wake.set()
        await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=WAIT_S)
        assert done
        assert task.cancelled()
        await scene.library.close()

    play(story)


def test_closing_waits_for_no_hook_for_long(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.hooks.registry.END_S", 0.1)

    async def story() -> None:
        scene.engine.gates["configure"] = asyncio.Event()
        scene.write("10-a.py", hook("a", "def configure(event): pass\n"))
        await asyncio.sleep(SETTLED_S + 0.05)
        await scene.library.look_once(timeout=0.1)
        assert scene.engine.story == ["configure 10-a (a)"]
        await scene.library.close()
        assert scene.engine.answers() == []

    asyncio.run(story())


def test_successes_are_reported(scene: Scene) -> None:
    async def story() -> None:
        path = scene.write("10-a.py", hook("a"))
        await scene.look()
        path.unlink()
        await scene.look()
        assert scene.logged == [f"hook loaded hook=10-a path={path}", "hook unloaded hook=10-a"]
        await scene.library.close()

    play(story)


def test_the_real_engine_is_kept_to_the_files(scene: Scene) -> None:
    from proxy.hooks.answers import Adjustment
    from proxy.hooks.engine.engine import HookEngine as Real
    from proxy.hooks.events import PreCreateContainer
    from proxy.hooks.facts import ContainerFacts, Decision

    def text(word: str) -> str:
        return (
            f"{HEAD}def configure(event): log.append(event.name)\n"
            f"def pre_create_container(event): return Adjustment(envs={{'WORD': {word!r} + str(log)}})\n"
        )

    async def story() -> None:
        engine = Real(reasons(scene.reported), lambda *_: None)
        library = HookRegistry(scene.config, engine, lambda: None, reasons(scene.reported))
        scene.library = library

        async def asked() -> Any:
            answers = engine.ask(PreCreateContainer(PodFacts(), ContainerFacts(), Decision()))
            return answers.outcome or await answers.wait()

        for word in ("one", "two"):
            scene.write("10-a.py", text(word))
            await scene.look()
            outcome = await asked()
            assert outcome.adjustment == Adjustment(envs={"WORD": f"{word}['10-a']"})
            assert outcome.owners == {"envs[WORD]": "10-a"}
        scene.write("10-a.py", f"{HEAD}def configure(event): raise ValueError('no')\n")
        await scene.look()
        assert "ValueError: no" in library.entries[0].error
        assert (await asked()).adjustment.envs == {"WORD": "two['10-a']"}
        (scene.etc / "10-a.py").unlink()
        await scene.look()
        assert engine.points == frozenset()
        await library.close()
        engine.close()

    play(story)
