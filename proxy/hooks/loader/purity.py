"""Whether a file only computes, as it declares with ``PURE = True``.

Such a hook is called on the daemon's own loop (``engine.loop_interrupt``), so it must not be able to block
it. A call that takes too long is interrupted by an exception, and made again in a thread. So a pure file must
contain nothing that could catch the exception, loop endlessly or wait, and nothing with effects that must not
repeat.
"""

from __future__ import annotations

import ast
from typing import Final

from proxy.model.errors import HookError

MODULES: Final = frozenset(
    (
        "__future__", "collections.abc", "dataclasses", "enum", "fnmatch", "functools", "json", "math",
        "proxy.hooks.api", "re", "string", "typing",
    )
)  # fmt: skip
"""What a pure file may import."""
_FORBIDDEN: Final[dict[type[ast.AST], str]] = {
    ast.While: "while",
    ast.Try: "try",
    ast.TryStar: "try",
    ast.With: "with",
    ast.AsyncWith: "async",
    ast.AsyncFor: "async",
    ast.AsyncFunctionDef: "async",
    ast.Await: "await",
    ast.Yield: "yield",
    ast.YieldFrom: "yield",
}
_NAMES: Final = frozenset(
    ("__import__", "breakpoint", "compile", "eval", "exec", "globals", "input", "open", "print", "vars")
)


def check(source: bytes) -> None:
    """See whether a file can be called on the loop.

    Args:
        source: Its text, which has been run.

    Raises:
        HookError: What it has that a pure file has not; the cause alone.
    """
    for node in ast.walk(ast.parse(source)):
        what = _FORBIDDEN.get(type(node)) or _other(node)
        if what:
            line = getattr(node, "lineno", 0)
            raise HookError(f"it says PURE = True, and has {what} (line {line}): a pure hook only computes")


def _other(node: ast.AST) -> str:
    if isinstance(node, ast.Import):
        return next((f"import {one.name}" for one in node.names if one.name not in MODULES), "")
    if isinstance(node, ast.ImportFrom):
        return "" if node.module in MODULES and not node.level else f"import {node.module or '.'}"
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return node.id
    return ""
