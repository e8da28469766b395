"""Which daemons get a connection to systemd."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proxy.assembly import _systemd
from proxy.backends.cgroup.cpuset import KernelCgroups
from proxy.backends.systemd.units import SystemdUnits


@pytest.mark.parametrize(("version", "there"), [(1, False), (2, True)])
def test_a_daemon_connects_to_systemd_only_on_cgroup_v2(tmp_path: Path, version: int, there: bool) -> None:
    async def given() -> tuple[Any, Any]:
        return _systemd(KernelCgroups(tmp_path, version))

    units, fences = asyncio.run(given())
    assert isinstance(units, SystemdUnits) is there
    assert (fences is not None) is there


def test_dbus_modules_are_loaded_only_with_a_unit() -> None:
    modules = "proxy.daemon, proxy.assembly, proxy.backends.systemd.units, proxy.executor.node_executor"
    code = f"import {modules}, sys; print('jeepney' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
