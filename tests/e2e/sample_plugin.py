"""The sample device plugin of Kubernetes, unmodified."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def built_sample_plugin() -> Path:
    """Build the program if necessary and return its path; skip the test if the build fails."""
    script = str(Path(__file__).with_name("build_sample_plugin.sh"))
    done = subprocess.run(["sh", script], capture_output=True, text=True, timeout=1200)
    if done.returncode:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    return Path(done.stdout.strip().splitlines()[-1])
