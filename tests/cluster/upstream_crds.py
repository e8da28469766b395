"""CRDs of the readers of our objects, from their own modules: nothing of them is copied."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

FILES = {
    "topology": (
        "github.com/k8stopologyawareschedwg/noderesourcetopology-api@v0.1.1",
        "manifests/crd.yaml",
    ),
    "koordinator": (
        "github.com/koordinator-sh/koordinator@v1.8.0",
        "config/crd/bases/topology.node.k8s.io_noderesourcetopologies.yaml",
    ),
    "volcano": (
        "github.com/volcano-sh/volcano@v1.15.0",
        "config/crd/volcano/bases/nodeinfo.volcano.sh_numatopologies.yaml",
    ),
    "all of volcano": ("volcano.sh/volcano@v1.10.0", "config/crd/volcano/bases"),
    "all of koordinator": ("github.com/koordinator-sh/koordinator@v1.8.0", "config/crd/bases"),
}


@cache
def crd(name: str) -> Path:
    """Return a file with a CRD, or a directory of them; skips the test if it cannot be downloaded."""
    module, file = FILES[name]
    if shutil.which("go") is None:
        pytest.skip(f"needs go, which downloads {module}")
    done = subprocess.run(
        ["go", "mod", "download", "-json", module], capture_output=True, text=True, timeout=300, check=False
    )
    directory = json.loads(done.stdout or "{}").get("Dir") if done.returncode == 0 else None
    if not directory:
        pytest.skip(
            f"{module} cannot be downloaded: {done.stdout.strip()[-200:] or done.stderr.strip()[-200:]}"
        )
    return Path(directory) / file
