"""The keeper's node in memory, and the hostile pods of ``bench``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
TOP = HERE.parents[1]
sys.path.insert(0, str(HERE))  # the helpers beside this file are plain modules
sys.path.insert(0, str(TOP / "bench"))


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if "played_node" not in sys.modules:
    _load("played_node", HERE.parent / "keeper/conftest.py")
