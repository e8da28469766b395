"""Rules of the layers that imports alone do not show; ``make lint`` runs this after import-linter.

The pure packages are those of the contract in ``pyproject.toml``. They import modules of ``ALLOWED`` only,
wait for nothing, call no built-in function that reads or writes, and assign no variable of their module. Only
the store replaces the state of the node and the values in it.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from proxy.engine.inflight import InflightCalls
from proxy.engine.runtime_knowledge import RuntimeKnowledge
from proxy.engine.state import NodeState

ROOT = Path(__file__).parents[2]
CONTRACT = "The pure packages stay pure"
ALLOWED = {
    *("__future__", "abc", "array", "collections", "dataclasses", "enum", "errno", "fnmatch", "functools"),
    *("hashlib", "heapq", "itertools", "json", "math", "operator", "re", "struct", "typing", "weakref"),
    *("hpack", "msgspec", "proxy"),
}
"""Packages that only compute. ``proxy`` is checked by import-linter, which also follows indirect imports."""
INPUT_OUTPUT = frozenset({"open", "print", "input", "exec", "eval", "compile", "breakpoint", "__import__"})
WAITS = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
HOLDERS = ("executor", "_executor", "store", "_store", "context", "_context")
"""The names that the code uses for objects that hold the state."""
FIELDS = {*NodeState.__struct_fields__, *RuntimeKnowledge.__struct_fields__, *InflightCalls.__struct_fields__}
MUTATING = ("add", "append", "clear", "discard", "extend", "pop", "popitem", "remove", "setdefault", "update")

Found = Iterator[tuple[int, str]]
"""Lines, each with what is wrong on it."""


def impurities(source: str) -> Found:
    """Yield what a module of a pure package must not do."""
    for node in ast.walk(ast.parse(source)):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "."]
        for module in modules:
            if module.partition(".")[0] not in ALLOWED:
                yield node.lineno, f"a pure package imports {module}"
        if isinstance(node, WAITS) or (isinstance(node, ast.comprehension) and node.is_async):
            yield getattr(node, "lineno", 0), "a pure package waits"
        elif isinstance(node, ast.Global):
            yield node.lineno, f"a pure package changes {', '.join(node.names)} of its module"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in INPUT_OUTPUT:
            yield node.lineno, f"a pure package calls {ast.unparse(node.func)}"


def assignments(source: str) -> Found:
    """Yield each assignment of the state that a module makes from outside of the store.

    Assignments of its fields and of their entries count, too, and calls that change them in place.
    """
    for tree in ast.walk(ast.parse(source)):
        changed: ast.expr | None = None
        if isinstance(tree, ast.Attribute | ast.Subscript) and isinstance(tree.ctx, ast.Store | ast.Del):
            changed = tree
        elif isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute):
            changed = tree.func.value if tree.func.attr in MUTATING else None
        if changed is not None and is_of_the_state(changed):
            yield tree.lineno, f"the store alone changes the state: {ast.unparse(tree)}"


def is_of_the_state(tree: ast.expr) -> bool:
    """Whether an expression is the state of a holder, or a field of it, or an entry of a field."""
    while isinstance(tree, ast.Attribute | ast.Subscript):
        if isinstance(tree, ast.Attribute) and tree.attr in ("state", "_state"):
            holder = tree.value
            name = holder.attr if isinstance(holder, ast.Attribute) else getattr(holder, "id", "")
            return name in HOLDERS
        if isinstance(tree, ast.Attribute) and tree.attr not in FIELDS:
            return False
        tree = tree.value
    return False


def pure_packages() -> list[Path]:
    """Return the directories of the packages that the contract names."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (each for each in contracts if each["name"] == CONTRACT)
    return [ROOT.joinpath(*name.split(".")) for name in contract["source_modules"]]


def violations() -> list[str]:
    """Return what breaks a rule, each with file and line."""
    found, pure = [], pure_packages()
    for path in sorted((ROOT / "proxy").rglob("*.py")):
        source, where = path.read_text(), path.relative_to(ROOT)
        rules = [assignments(source)]
        if any(package in path.parents for package in pure):
            rules.append(impurities(source))
        found += [f"{where}:{line}: {what}" for rule in rules for line, what in rule]
    return found


def main() -> int:
    """Print what breaks a rule; returns the exit status."""
    found = violations()
    print("\n".join(found), end="\n" * bool(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
