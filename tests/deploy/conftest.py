"""helm, built once for all tests of the charts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def helm() -> str:
    if os.environ.get("TOPOPROXY_HELM") == "no":
        pytest.skip("TOPOPROXY_HELM=no")
    script = Path(__file__).parent / "build_helm.sh"
    done = subprocess.run(["sh", script], capture_output=True, text=True, timeout=1000, check=False)
    if done.returncode:
        pytest.skip(done.stderr.strip())
    return done.stdout.strip().splitlines()[-1]
