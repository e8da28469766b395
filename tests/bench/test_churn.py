"""The limits of the churn bench name objects of the daemon that exist."""

from __future__ import annotations

import importlib
import inspect

import churn
import pytest


@pytest.mark.parametrize("name", churn.SIZE_LIMITS)
def test_each_object_with_a_limit_exists(name: str) -> None:
    """After a rename, an object would be held to the limit of those that may not grow."""
    path, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError:
        path, _, owner = path.rpartition(".")
        source = inspect.getsource(getattr(importlib.import_module(path), owner))
        assert f"self.{attribute}" in source or f"\n    {attribute}: " in source
    else:
        assert hasattr(module, attribute)
