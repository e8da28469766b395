from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

CPU = "devices/system/cpu"
NODE = "devices/system/node"


@pytest.fixture
def sysfs(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Write files below a directory used as /sys; names ending in / are empty directories."""

    def write(files: dict[str, str]) -> Path:
        root = tmp_path / "root" / "sys"
        for name, text in files.items():
            path = root / name.replace("CPU/", f"{CPU}/", 1).replace("NODE/", f"{NODE}/", 1)
            if name.endswith("/"):
                path.mkdir(parents=True, exist_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        return root

    return write
