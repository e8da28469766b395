"""Which schemas there are, and which of them we can run.

A schema can be run when ``schemas/NAME.py`` exists. It holds one function,
``check(case: Case, topologies: Topologies) -> Outcome``. Adding a schema is adding that file, and removing
its line below.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

from tests.conformance.cases import Case, Outcome, Topologies

Check = Callable[[Case, Topologies], Outcome]

DATA = "topologies"
"""The schema of files without cases, to which other files refer."""

NOT_YET: dict[str, str] = {}
"""Schemas that we know and cannot run yet, with what is missing."""

_FOLDER = Path(__file__).with_name("schemas")


def supported() -> list[str]:
    """List the schemas that can be run."""
    return sorted(module.name for module in pkgutil.iter_modules([str(_FOLDER)]))


def not_yet(schema: str) -> str | None:
    """Return what is missing for a schema that cannot be run yet; None for an unknown one."""
    family = "Koordinator's rules" if schema.startswith("koord_") else None
    return NOT_YET.get(schema, family)


def find(schema: str) -> Check | None:
    """Return the check of a schema, or None if there is none."""
    if schema not in supported():
        return None
    check: Check = importlib.import_module(f"tests.conformance.schemas.{schema}").check
    return check
