"""The definitions that a hook file has, and whether one with ``PURE = True`` only computes.

A pure hook is called on the daemon's own loop (``hooks.engine.loop_interrupt``), so it must not be able to
block it. A call that takes too long is interrupted by an exception, and repeated in a thread. So a pure file
must contain nothing that could catch the exception, loop endlessly or wait, and nothing with effects that
must not repeat.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Final

from proxy.hooks.api import SUPPORTED
from proxy.hooks.events import POINTS
from proxy.hooks.hook import LONGEST_TIMEOUT_S, HookFailurePolicy
from proxy.hooks.loader.schema import settings_of
from proxy.model.errors import HookError

SHORTEST_TIMEOUT_S: Final = 0.001
_SIMILAR_ENOUGH: Final = 0.85
_EVENT_SIMILAR_ENOUGH: Final = 0.6


@dataclass(frozen=True, slots=True)
class Contract:
    """The definitions of a hook file.

    Attributes:
        handlers: Point to function.
        settings: An instance of the file's ``Settings``, made from the configuration; None if it has none.
        timeout: ``TIMEOUT``, seconds; None if it is not set.
        policy: ``FAILURE_POLICY``; None if it is not set.
        pure: ``PURE``.
    """

    handlers: Mapping[str, Callable[..., Any]]
    settings: Any
    timeout: float | None
    policy: HookFailurePolicy | None
    pure: bool = False


def contract_of(module: ModuleType, given: Mapping[str, Any] | None, where: str) -> Contract:
    """Check whether a module is a valid hook.

    Args:
        module: A file that was run.
        given: The hook's own configuration.
        where: The path of that configuration, for messages.

    Raises:
        HookError: A definition is missing or invalid; the text is only the cause.
    """
    check_version(vars(module))
    handlers = _handlers(module)
    timeout, policy = _timeout(vars(module)), _policy(vars(module))
    settings = settings_of(vars(module).get("Settings"), given, where)
    return Contract(handlers, settings, timeout, policy, _pure(vars(module)))


def check_version(names: Mapping[str, Any]) -> None:
    """Check ``API_VERSION`` among the names that a hook file defines.

    Raises:
        HookError: It is missing or not supported; the text is only the cause.
    """
    supported = " or ".join(map(str, SUPPORTED))
    if "API_VERSION" not in names:
        raise HookError(f"it has no API_VERSION: write API_VERSION = {SUPPORTED[-1]}")
    version = names["API_VERSION"]
    if type(version) is not int or version not in SUPPORTED:
        raise HookError(f"its API_VERSION is {_shown(version)}, and supported is {supported}")


def _handlers(module: ModuleType) -> dict[str, Callable[..., Any]]:
    handlers = {}
    for name, value in vars(module).items():
        if name in POINTS:
            handlers[name] = _handler(name, value)
        elif isinstance(value, FunctionType) and value.__module__ == module.__name__ and name[0] != "_":
            # ``PreCreateContainer`` is the event; a function of that name is probably meant as its handler.
            plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
            cutoff = _EVENT_SIMILAR_ENOUGH if plain.startswith(("pre_", "post_")) else _SIMILAR_ENOUGH
            if close := difflib.get_close_matches(plain, POINTS, n=1, cutoff=cutoff):
                raise HookError(
                    f"{name} is not a hook point; did you mean {close[0]}? "
                    "(a helper function may begin with _)"
                )
    if not handlers:
        raise HookError(
            "it has no handler: define a function with the name of a hook point, such as pre_create_container"
        )
    return handlers


def _handler(name: str, value: Any) -> Callable[..., Any]:
    if not callable(value) or isinstance(value, type):
        raise HookError(f"{name} is a {type(value).__name__}, and must be a function")
    if inspect.isgeneratorfunction(value) or inspect.isasyncgenfunction(value):
        raise HookError(f"{name} has a yield in it: a handler returns its answer")
    try:
        inspect.signature(value).bind(None)
    except TypeError:
        raise HookError(
            f"{name}{inspect.signature(value)} cannot be called with one argument, the event"
        ) from None
    except ValueError:  # written in C: its signature is unknown
        pass
    if not inspect.iscoroutinefunction(value) and inspect.iscoroutinefunction(type(value).__call__):
        return value.__call__  # type: ignore[no-any-return]  # an object whose call is a coroutine function
    return value  # type: ignore[no-any-return]


def _timeout(names: Mapping[str, Any]) -> float | None:
    value = names.get("TIMEOUT")
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not SHORTEST_TIMEOUT_S <= value <= LONGEST_TIMEOUT_S:
        raise HookError(
            f"its TIMEOUT is {_shown(value)}, not seconds from {SHORTEST_TIMEOUT_S} to {LONGEST_TIMEOUT_S:g}"
        )
    return float(value)


def _policy(names: Mapping[str, Any]) -> HookFailurePolicy | None:
    value = names.get("FAILURE_POLICY")
    if value is None:
        return None
    if not isinstance(value, str) or value not in list(HookFailurePolicy):
        raise HookError(f"its FAILURE_POLICY is {_shown(value)}, not {' or '.join(HookFailurePolicy)}")
    return HookFailurePolicy(value)


def _pure(names: Mapping[str, Any]) -> bool:
    value = names.get("PURE", False)
    if not isinstance(value, bool):
        raise HookError(f"its PURE is {_shown(value)}, not True or False")
    return value


def _shown(value: Any) -> str:
    return repr(value)[:40]


PURE_MODULES: Final = frozenset(
    (
        "__future__", "collections.abc", "dataclasses", "enum", "fnmatch", "functools", "json", "math",
        "proxy.hooks.api", "re", "string", "typing",
    )
)  # fmt: skip
"""What a pure file may import."""
_FORBIDDEN_NODES: Final[dict[type[ast.AST], str]] = {
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
_FORBIDDEN_NAMES: Final = frozenset(
    ("__import__", "breakpoint", "compile", "eval", "exec", "globals", "input", "open", "print", "vars")
)


def check_purity(source: bytes) -> None:
    """Check whether the functions of a file may be called on the loop.

    Args:
        source: The file's text, which has been run already.

    Raises:
        HookError: It contains code that a pure file must not contain; the text is only the cause.
    """
    for node in ast.walk(ast.parse(source)):
        what = _FORBIDDEN_NODES.get(type(node)) or _forbidden_import_or_name(node)
        if what:
            line = getattr(node, "lineno", 0)
            raise HookError(f"it has PURE = True, and has {what} (line {line}): a pure hook only computes")


def _forbidden_import_or_name(node: ast.AST) -> str:
    if isinstance(node, ast.Import):
        return next((f"import {alias.name}" for alias in node.names if alias.name not in PURE_MODULES), "")
    if isinstance(node, ast.ImportFrom):
        return "" if node.module in PURE_MODULES and not node.level else f"import {node.module or '.'}"
    if isinstance(node, ast.Name) and node.id in _FORBIDDEN_NAMES:
        return node.id
    return ""
