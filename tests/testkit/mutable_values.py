"""Which classes of a package make values that can be changed after they were made."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import msgspec


def modules_of(package: ModuleType) -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(found.name)


def mutable_values(package: ModuleType) -> set[str]:
    """List the structs and data classes of a package whose attributes can be assigned."""
    classes = (
        each
        for module in modules_of(package)
        for each in vars(module).values()
        if inspect.isclass(each) and each.__module__ == module.__name__
    )
    return {each.__name__ for each in classes if _is_mutable(each)}


def _is_mutable(each: type) -> bool:
    if issubclass(each, msgspec.Struct):
        return not each.__struct_config__.frozen
    return dataclasses.is_dataclass(each) and not each.__dataclass_params__.frozen
