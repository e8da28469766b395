"""Hook files that may declare themselves pure."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.config.hooks import HooksConfig
from proxy.hooks.loader import contract
from proxy.hooks.loader.loading import load
from proxy.model.errors import HookError

GOOD = """
from __future__ import annotations

import json
from dataclasses import dataclass

from proxy.hooks.api import Adjustment, Configure, PreCreateContainer

API_VERSION = 1
PURE = True
settings = None


def configure(event: Configure) -> None:
    global settings
    settings = event.settings


def pre_create_container(event: PreCreateContainer) -> Adjustment:
    return Adjustment(envs={name: json.dumps(str(event.decision.cpus)) for name in ("A", "B")})
"""


def test_a_file_that_only_computes_is_pure() -> None:
    contract.check_purity(GOOD.encode())
    assert load("10-a", Path("/hooks/10-a.py"), GOOD.encode(), HooksConfig()).hook.pure
    other = GOOD.replace("PURE = True\n", "").encode()
    assert not load("10-a", Path("/hooks/10-a.py"), other, HooksConfig()).hook.pure


@pytest.mark.parametrize(
    ("line", "construct"),
    [
        ("def f():\n    while True: pass", r"while \(line 22\)"),
        ("def f():\n    try: pass\n    except BaseException: pass", "try"),
        ("def f():\n    with open('/x') as file: pass", "with"),
        ("async def f(): pass", "async"),
        ("def f(): yield 1", "yield"),
        ("import time", "import time"),
        ("import os.path", "import os.path"),
        ("from subprocess import run", "import subprocess"),
        ("from proxy.model import idset", "import proxy.model"),
        ("x = lambda: open('/x')", "open"),
        ("x = lambda: eval('1')", "eval"),
    ],
)
def test_code_that_keeps_state_or_has_effects_is_refused(line: str, construct: str) -> None:
    data = f"{GOOD}{line}\n".encode()
    with pytest.raises(HookError, match=rf"PURE = True, and has {construct}.*a pure hook only computes"):
        load("10-a", Path("/hooks/10-a.py"), data, HooksConfig())
    load("10-a", Path("/hooks/10-a.py"), data.replace(b"PURE = True", b"PURE = False"), HooksConfig())


def test_pure_must_be_a_boolean() -> None:
    data = GOOD.replace("PURE = True", "PURE = 'yes'").encode()
    with pytest.raises(HookError, match="its PURE is 'yes', not True or False"):
        load("10-a", Path("/hooks/10-a.py"), data, HooksConfig())
