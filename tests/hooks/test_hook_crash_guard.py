"""Hook files that crash the daemon are skipped after two crashes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from proxy.config.load import parse
from proxy.hooks.engine.engine import HookEngine
from proxy.hooks.loader.versions import CrashingHookError, CrashMarks
from proxy.hooks.registry import HookRegistry
from proxy.model.errors import HookError
from tests.testkit.waiting import until

FILE = Path("/etc/topoproxy/hooks.d/50-x.py")


def test_a_file_that_crashed_the_daemon_twice_is_not_loaded(tmp_path: Path) -> None:
    for _ in range(2):
        CrashMarks(tmp_path / "marks").mark("50-x", FILE, b"one")  # the daemon crashes
    with pytest.raises(
        CrashingHookError, match=r"50-x\.py: the daemon has ended 2 times .* or remove .*marks/50-x"
    ):
        CrashMarks(tmp_path / "marks").mark("50-x", FILE, b"one")
    CrashMarks(tmp_path / "marks").mark("50-y", FILE, b"one")
    CrashMarks(tmp_path / "marks").mark("50-x", FILE, b"two")


def test_a_successful_or_failed_load_resets_the_count(tmp_path: Path) -> None:
    trials = CrashMarks(tmp_path / "marks")
    for _ in range(5):
        trials.mark("50-x", FILE, b"one")
        trials.remove("50-x")
    assert list((tmp_path / "marks").iterdir()) == []


def test_marks_that_cannot_be_written_or_read_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (None, tmp_path / "file", tmp_path / "no" / "such"):
        for _ in range(4):
            CrashMarks(directory).mark("50-x", FILE, b"one")
        CrashMarks(directory).remove("50-x")
    (tmp_path / "50-x").write_bytes(b"\xff garbage")
    CrashMarks(tmp_path).mark("50-x", FILE, b"one")
    assert (tmp_path / "50-x").read_text().endswith(" 1")


SCRIPT = """
    import asyncio, sys
    from pathlib import Path
    from proxy.config import parse
    from proxy.hooks.engine.engine import HookEngine
    from proxy.hooks.registry import HookRegistry

    root = Path(sys.argv[1])
    where = f"directory: {root}/hooks.d, vendorDirectory: {root}/none, serverDirectory: ''"
    config = parse(f"hooks: {{{where}}}", "f").hooks

    def say(message, **keys):
        print(keys.get("err", message), flush=True)

    async def main():
        engine = HookEngine(say, lambda *_: None)
        registry = HookRegistry(config, engine, lambda: None, say, marks=root / "marks")
        await registry.scan_once()
        print(sorted(engine.points))
        await registry.close()

    asyncio.run(main())
"""


@pytest.mark.parametrize("where", ["", "def configure(event):\n    "])
def test_the_third_start_is_without_the_file_and_with_the_others(tmp_path: Path, where: str) -> None:
    hooks = tmp_path / "hooks.d"
    hooks.mkdir(mode=0o755)
    good = "API_VERSION = 1\n\n\ndef pre_create_container(event):\n    return None\n"
    for number in range(10, 16):
        (hooks / f"{number}-good.py").write_text(good)
    deadly = good.replace("create_container", "stop_container")
    (hooks / "50-deadly.py").write_text(f"{deadly}\n\n{where}__import__('os')._exit(7)\n")

    def start() -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)

    assert [start().returncode for _ in range(2)] == [7, 7]
    third = start()
    assert (third.returncode, third.stderr) == (0, "")
    assert "50-deadly.py: the daemon has ended 2 times" in third.stdout
    assert "['pre_create_container']" in third.stdout
    (hooks / "50-deadly.py").write_text(deadly)
    assert "['pre_create_container', 'pre_stop_container']" in start().stdout
    assert list((tmp_path / "marks").iterdir()) == []


def test_a_stop_while_a_file_is_brought_into_use_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.hooks.registry.STOP_TIMEOUT_S", 0.2)
    hooks, marks = tmp_path / "hooks.d", tmp_path / "marks"
    hooks.mkdir(mode=0o755)
    slow = "API_VERSION = 1\n\n\ndef configure(event):\n    __import__('time').sleep(1)\n"
    (hooks / "50-slow.py").write_text(slow)
    config = parse(
        f"hooks: {{directory: {hooks}, vendorDirectory: {tmp_path}/none, serverDirectory: ''}}", "f"
    )

    async def start_and_stop() -> None:
        engine = HookEngine(lambda *_, **keys: None, lambda *_: None)
        registry = HookRegistry(config.hooks, engine, lambda: None, lambda *_, **keys: None, marks=marks)
        running = asyncio.create_task(registry.run())
        await until((marks / "50-slow").exists)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await registry.close()
        engine.close()

    asyncio.run(start_and_stop())
    assert list(marks.iterdir()) == []


def test_a_crashing_hook_error_is_a_hook_error() -> None:
    assert issubclass(CrashingHookError, HookError)
