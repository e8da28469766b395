"""Child processes of hooks: they keep no descriptors of the daemon, and end with the hook's code."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

SETUP = """
import asyncio, fcntl, json, os, select, socket, sys, tempfile, threading, time
from proxy.hooks.engine import HookEngine
from proxy.hooks import forks
from proxy.hooks.answers import Adjustment
from proxy.hooks.hook import Hook
from proxy.hooks.samples import sample
from tests.testkit.captured_log import of_hooks

forks.install_fork_handlers()
directory = tempfile.mkdtemp()
locked = open(directory + "/lock", "w")
fcntl.flock(locked, fcntl.LOCK_EX)
ours, theirs = socket.socketpair()
epoll = select.epoll()
plain = open(directory + "/plain", "w")
reads, writes = os.pipe()
parent = os.getpid()
children = []

def fork():
    pid = os.fork()
    if pid:
        children.append(pid)
    return not pid

def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True

def call_hooks(*handlers):
    async def main():
        errors = []
        engine = HookEngine(of_hooks(errors), lambda *_: None)
        engine.use([Hook(f"{i}0-x", "x.py", {"pre_create_container": h}) for i, h in enumerate(handlers)])
        outcome = await asyncio.wait_for(engine.call_hooks(sample("pre_create_container")).wait(), 30)
        engine.close()
        return outcome.adjustment.labels, errors
    return asyncio.run(main())

def ends():
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
"""


def run_script(script: str) -> object:
    """Run a script after the setup in a separate process; returns its last line of output."""
    whole = SETUP + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", whole], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_child_does_not_keep_descriptors_of_the_daemon() -> None:
    is_open = run_script(
        """
        def hook(event):
            if fork():
                all_of_it = (locked, ours, theirs, epoll, plain)
                found = [is_open(thing.fileno()) for thing in all_of_it] + [is_open(writes)]
                os.write(writes, json.dumps(found).encode())
                time.sleep(60)

        call_hooks(hook)
        found = os.read(reads, 1000).decode()
        locked.close()
        fcntl.flock(open(directory + "/lock"), fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if the child has it
        ours.close()
        assert theirs.recv(1) == b"", "the other side sees the end"
        os.kill(children[0], 9)
        print(found)
        """
    )
    assert is_open == [False, False, False, False, True, True]


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("ending", ["return Adjustment(labels={'a': 'b'})", "raise OSError"])
def test_a_child_that_returns_from_a_hook_ends_there(kind: str, ending: str) -> None:
    reported = run_script(
        f"""
        {kind} first(event):
            fork()
            {ending}

        def second(event):
            os.write(writes, b"x")

        labels, errors = call_hooks(first, second)
        print(json.dumps([labels, len(errors), ends(), len(os.read(reads, 100))]))
        """
    )
    labels, failures = ({"a": "b"}, 0) if ending.startswith("return") else ({}, 1)
    assert reported == [labels, failures, [0], 1], "the child calls no hook"


def test_a_fork_of_the_main_thread_is_not_changed() -> None:
    assert run_script(
        """
        if fork():
            forks.exit_if_child()
            os.write(writes, json.dumps([is_open(ours.fileno()), is_open(locked.fileno())]).encode())
            os._exit(7)
        assert ends() == [7]
        print(os.read(reads, 100).decode())
        """
    ) == [True, True]


def test_a_child_of_a_hook_file_ends_after_the_load() -> None:
    assert run_script(
        """
        from proxy.config.hooks import HooksConfig
        from pathlib import Path
        from proxy.hooks.loader.loading import load

        text = b"import os\\nAPI_VERSION = 1\\nchild = os.fork()\\ndef pre_create_container(event): pass\\n"
        loaded = load("10-x", Path(directory, "10-x.py"), text, HooksConfig())
        children.append(loaded.module.child)
        print(json.dumps(ends()))
        """
    ) == [0]
