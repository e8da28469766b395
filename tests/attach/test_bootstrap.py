"""The script that attaches a new node: it waits for the units, and changes nothing where they do not come."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "systemd/bootstrap-node.sh"
SYSTEMCTL = '#!/bin/sh\necho "$3" >>"$LOG"\n[ "$(grep -c "$3" "$LOG")" -ge "$TIMES" ]\n'


@pytest.mark.parametrize(("times", "seconds", "attached"), [(1, "1", True), (2, "3", True), (9, "1", False)])
def test_it_attaches_once_both_units_run(tmp_path: Path, times: int, seconds: str, attached: bool) -> None:
    for name, text in (("systemctl", SYSTEMCTL), ("topoproxy", '#!/bin/sh\necho "$*" >>"$LOG"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "log"
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log), "TIMES": str(times)}
    done = subprocess.run(["sh", SCRIPT, seconds], env=env, capture_output=True, text=True, timeout=60)
    lines = log.read_text().splitlines()
    assert (done.returncode == 0) is attached
    assert ("attach --yes" in lines) is attached
    if attached:
        assert lines == [*["containerd.service"] * times, *["kubelet.service"] * times, "attach --yes"]
    else:
        assert "containerd.service is not active" in done.stderr
