"""Loading a hook from the text of a file."""

from __future__ import annotations

import asyncio
import importlib
import linecache
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest

from proxy.config import parse
from proxy.config.hooks import HooksConfig
from proxy.hooks.hook import HookFailurePolicy
from proxy.hooks.loader.loading import LoadAttempt, Loaded, describe_error, load, load_file
from proxy.model.errors import HookError

HEAD = "API_VERSION = 1\n"
HANDLER = "def pre_create_container(event): return event\n"
PATH = Path("/etc/topoproxy/hooks.d/10-quota.py")


def load_text(text: str, config: str = "", deadline: float = 30.0) -> Loaded:
    return load("10-quota", PATH, text.encode(), parse(config, "f").hooks, deadline)


def hook_modules() -> set[str]:
    return {name for name in sys.modules if "topoproxy_hooks" in name}


def ended(thread: threading.Thread) -> bool:
    thread.join(30)
    return not thread.is_alive()


def hook_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hook 10-quota loads"]


def error_of(text: str, config: str = "", deadline: float = 30.0) -> str:
    modules, threads = hook_modules(), set(hook_threads())  # another test may have left a file that hangs
    with pytest.raises(HookError) as caught:
        load_text(text, config, deadline)
    assert all(ended(thread) for thread in set(hook_threads()) - threads)
    assert hook_modules() <= modules
    prefix = f"cannot load hook {PATH}: "
    assert str(caught.value).startswith(prefix)
    return str(caught.value).removeprefix(prefix)


def test_functions_named_after_points_are_its_handlers() -> None:
    loaded = load_text(
        f"from proxy.hooks.api import *\n{HEAD}{HANDLER}"
        "async def post_start_container(event, more=1): return 'later'\n"
        "def _pre_create_containers(event): pass\n"
        "def helper(a, b): pass\n"
    )
    hook = loaded.hook
    assert (hook.name, hook.source, hook.remote) == ("10-quota", str(PATH), False)
    assert sorted(hook.handlers) == ["post_start_container", "pre_create_container"]
    assert hook.handlers["pre_create_container"]("asked") == "asked"
    assert asyncio.run(hook.handlers["post_start_container"]("asked")) == "later"
    assert (hook.timeout, hook.policy, loaded.settings) == (0.5, HookFailurePolicy.IGNORE, None)


def test_objects_that_can_be_called_are_handlers_too() -> None:
    hook = load_text(
        f"import functools\n{HEAD}"
        "class Asked:\n    async def __call__(self, event): return event\n"
        "pre_create_container = Asked()\n"
        "def _both(more, event): return more, event\n"
        "pre_start_container = functools.partial(_both, 1)\n"
    ).hook
    assert asyncio.iscoroutinefunction(hook.handlers["pre_create_container"])
    assert asyncio.run(hook.handlers["pre_create_container"](7)) == 7
    assert hook.handlers["pre_start_container"](2) == (1, 2)


def test_timeout_and_policy_of_the_file_apply_unless_configured() -> None:
    text = f"{HEAD}{HANDLER}TIMEOUT = 2\nFAILURE_POLICY = 'Fail'\n"
    for config, expected in (
        ("", (2.0, HookFailurePolicy.FAIL)),
        ("hooks: {timeout: 1s, failurePolicy: Ignore}", (2.0, HookFailurePolicy.FAIL)),
        ("hooks: {settings: {10-quota: {timeout: 3s}}}", (3.0, HookFailurePolicy.FAIL)),
        ("hooks: {settings: {10-quota: {failurePolicy: Ignore}}}", (2.0, HookFailurePolicy.IGNORE)),
        (
            "hooks: {settings: {11-quota: {timeout: 3s, failurePolicy: Ignore}}}",
            (2.0, HookFailurePolicy.FAIL),
        ),
    ):
        hook = load_text(text, config).hook
        assert (hook.timeout, hook.policy) == expected, config
        assert type(hook.policy) is HookFailurePolicy
    hook = load_text(HEAD + HANDLER, "hooks: {timeout: 1s, failurePolicy: Fail}").hook
    assert (hook.timeout, hook.policy) == (1.0, HookFailurePolicy.FAIL)


def test_the_settings_of_a_hook_are_read_from_the_configuration() -> None:
    text = (
        f"from __future__ import annotations\nfrom dataclasses import dataclass\n{HEAD}{HANDLER}"
        "@dataclass(frozen=True, slots=True)\n"
        "class Settings:\n    percent: int = 3\n    names: list[str] = None\n"
    )
    assert load_text(text).settings.percent == 3
    config = "hooks: {settings: {10-quota: {config: {percent: 9, names: [a]}}}}"
    settings = load_text(text, config).settings
    assert (settings.percent, settings.names) == (9, ["a"])
    error = error_of(text, "hooks: {settings: {10-quota: {config: {percents: 9}}}}")
    assert error == "hooks.settings.10-quota.config.percents: unknown key; did you mean percent?"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x = 1\n\nraise ValueError('no such\\nthing')\n", "ValueError: no such (line 3)"),
        ("def f():\n    return 1 / 0\nf()\n", "ZeroDivisionError: division by zero (line 2)"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3 (line 2)"),
        ("raise KeyboardInterrupt\n", "KeyboardInterrupt (line 1)"),
        ("import json\njson.loads('{')\n", "JSONDecodeError: Expecting property name enclosed in double qu"),
        ("def f(:\n", "SyntaxError: invalid syntax (line 1)"),
        ("  x = 1\n", "IndentationError: unexpected indent (line 1)"),
        ("import hook_other\n", "ModuleNotFoundError: No module named 'hook_other' (line 1)"),
        ("from . import other\n", "ImportError: attempted relative import"),
        ("class E(Exception):\n    def __str__(self): raise SystemExit\nraise E\n", "E, whose message"),
        (f"raise ValueError({'x' * 1000!r})\n", "ValueError: xxx"),
        (HANDLER, "it has no API_VERSION: write API_VERSION = 1"),
        (f"API_VERSION = 2\n{HANDLER}", "its API_VERSION is 2, and supported is 1"),
        (f"API_VERSION = '1'\n{HANDLER}", "its API_VERSION is '1', and supported is 1"),
        (f"API_VERSION = True\n{HANDLER}", "its API_VERSION is True, and supported is 1"),
        (HEAD, "it has no handler: define a function with the name of a hook point, such as pre_create_c"),
        (f"{HEAD}from proxy.hooks.api import *\n", "it has no handler"),
        (f"{HEAD}configure = 5\n", "configure is a int, and must be a function"),
        (f"{HEAD}class configure:\n    pass\n", "configure is a type, and must be a function"),
        (f"{HEAD}def configure(): pass\n", "configure() cannot be called with one argument, the event"),
        (f"{HEAD}def configure(a, b): pass\n", "configure(a, b) cannot be called with one argument, the ev"),
        (f"{HEAD}def configure(*, event): pass\n", "configure(*, event) cannot be called with one argum"),
        (f"{HEAD}def configure(event): yield\n", "configure has a yield in it: a handler returns its answer"),
        (f"{HEAD}async def configure(event): yield\n", "configure has a yield in it: a handler returns its"),
        (f"{HEAD}def pre_create_containers(e): pass\n", "pre_create_containers is not a hook point; did you"),
        (f"{HEAD}def pre_create(e): pass\n", "pre_create is not a hook point; did you mean pre_"),
        (f"{HEAD}def PreCreateContainer(e): pass\n", "PreCreateContainer is not a hook point; did you"),
        (f"{HEAD}def synchronise(e): pass\n", "synchronise is not a hook point; did you mean synchronize?"),
        (f"{HEAD}{HANDLER}TIMEOUT = 0\n", "its TIMEOUT is 0, not seconds from 0.001 to 100"),
        (f"{HEAD}{HANDLER}TIMEOUT = 101\n", "its TIMEOUT is 101, not seconds from 0.001 to 100"),
        (f"{HEAD}{HANDLER}TIMEOUT = '1s'\n", "its TIMEOUT is '1s', not seconds from 0.001 to 100"),
        (f"{HEAD}{HANDLER}TIMEOUT = float('nan')\n", "its TIMEOUT is nan, not seconds from 0.001 to 100"),
        (f"{HEAD}{HANDLER}TIMEOUT = True\n", "its TIMEOUT is True, not seconds from 0.001 to 100"),
        (f"{HEAD}{HANDLER}FAILURE_POLICY = 'fail'\n", "its FAILURE_POLICY is 'fail', not Fail or Ignore"),
        (f"{HEAD}{HANDLER}FAILURE_POLICY = []\n", "its FAILURE_POLICY is [], not Fail or Ignore"),
        (f"{HEAD}{HANDLER}Settings = 5\n", "Settings is not a dataclass: put @dataclass above it"),
    ],
)  # fmt: skip
def test_every_refusal_has_its_cause(text: str, error: str) -> None:
    reported = error_of(text)
    assert reported.startswith(error)
    assert len(reported) < 400
    assert "\n" not in reported


def test_text_that_is_not_python_is_refused() -> None:
    for data in (b"\0", b"\xff\xfe\0x", b"x = '\xe9'\n", b"# coding: nowhere\n"):
        with pytest.raises(HookError, match="cannot load hook"):
            load("10-quota", PATH, data, HooksConfig())
    latin = f"# coding: latin-1\n{HEAD}{HANDLER}X = 'é'\n".encode("latin-1")
    loaded = load("10-quota", PATH, latin, HooksConfig())
    assert loaded.module is not None
    assert vars(loaded.module)["X"] == "é"


def test_each_hook_has_a_separate_module_that_is_unloaded_with_it(tmp_path: Path) -> None:
    path, before = list(sys.path), set(sys.modules)
    file = tmp_path / "10-quota.py"
    file.write_text(f"{HEAD}{HANDLER}NAME, FILE = __name__, __file__\n")
    file.chmod(0o644)
    one, two = load_file(file), load_file(file)
    assert one.module is not None
    assert two.module is not None
    assert vars(one.module)["FILE"] == str(file)
    names = [vars(loaded.module)["NAME"] for loaded in (one, two)]
    assert names[0] != names[1]
    assert set(names) == set(sys.modules) - before
    for name in names:
        with pytest.raises(SyntaxError):
            compile(f"import {name}", "x", "exec")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("_topoproxy_hooks")
    one.unload()
    two.unload()
    two.unload()
    assert set(sys.modules) == before
    assert sys.path == path
    assert [entry.name for entry in tmp_path.iterdir()] == ["10-quota.py"]
    assert one.hook.handlers["pre_create_container"](1) == 1


def test_tracebacks_show_the_lines_of_the_version_that_runs() -> None:
    one = load_text(f"{HEAD}def configure(event):\n    raise ValueError('one')\n")
    one.show_lines()
    load_text(f"{HEAD}# more\n# more\ndef configure(event):\n    pass\n")
    try:
        with pytest.raises(ValueError) as caught:
            one.hook.handlers["configure"](None)
        frame = traceback.extract_tb(caught.value.__traceback__)[-1]
        assert (frame.filename, frame.lineno, frame.line) == (str(PATH), 3, "raise ValueError('one')")
    finally:
        linecache.cache.pop(str(PATH), None)


@pytest.mark.parametrize("loop", ["time.sleep(0.01)", "pass"])
def test_a_file_that_hangs_is_stopped_at_its_deadline(loop: str) -> None:
    error = error_of(f"import time\nwhile True:\n    {loop}\n", deadline=2.0)
    assert error.startswith("it has not finished loading after 2 s (line ")
    assert error[-2] in "23"


def test_a_file_that_is_loaded_too_late_is_not_kept() -> None:
    before = hook_modules()
    error = error_of(
        f"{HEAD}{HANDLER}import time\ntry:\n    time.sleep(2.5)\nexcept SystemExit:\n    pass\n", deadline=2.0
    )
    assert "not finished loading" in error
    assert hook_modules() == before


def test_a_file_loaded_before_its_abandonment_is_not_kept() -> None:
    before = hook_modules()
    attempt = LoadAttempt("10-quota", PATH, (HEAD + HANDLER).encode(), HooksConfig())
    attempt.start()
    attempt.future.result(30)
    assert "not finished loading" in str(attempt.abandon(0.1))
    assert hook_modules() == before


def test_settings_that_hang_are_stopped_at_the_deadline() -> None:
    text = (
        f"import time\nfrom dataclasses import dataclass\n{HEAD}{HANDLER}"
        "@dataclass\nclass Settings:\n    def __post_init__(self):\n        while True: time.sleep(0.01)\n"
    )
    assert "not finished loading after 2 s (line 8)" in error_of(text, deadline=2.0)


def test_a_failed_load_keeps_no_references_to_the_file() -> None:
    with pytest.raises(HookError) as caught:
        load_text("big = 1\nraise ValueError\n")
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.__traceback__ is None


def test_concurrent_loads_do_not_wait_for_each_other() -> None:
    slow = LoadAttempt("10-quota", PATH, b"import time\ntime.sleep(60)\n", HooksConfig())
    slow.start()
    began = time.monotonic()
    assert load_text(HEAD + HANDLER).hook.name == "10-quota"
    assert time.monotonic() - began < 30
    slow.abandon(0)


def test_a_file_is_read_as_the_daemon_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "10-quota.py"
    file.write_text(HEAD + HANDLER)
    file.chmod(0o666)
    with pytest.raises(HookError, match=f"cannot trust hook {file}"):
        load_file(file)
    assert load_file(file, trusted=False).hook.name == "10-quota"


class SilentError(Exception):
    def __str__(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("exception", "error"),
    [
        (SilentError(), "SilentError"),
        (ValueError(" a \n b"), "ValueError: a"),
        (OSError(2, "gone"), "OSError: [Errno 2] gone"),
    ],
)
def test_an_exception_is_reported_in_one_line(exception: Exception, error: str) -> None:
    assert describe_error(exception, "/x").replace("FileNotFoundError", "OSError") == error
