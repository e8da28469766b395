"""A log message is a constant text; variable parts are keys."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import proxy

PACKAGE = Path(proxy.__file__).parent
METHODS = frozenset(
    {"event", "debug", "warning", "problem", "frequent", "resolved", "forget", "info", "error", "exception"}
)
PARTS = frozenset({"_report_problem", "_report_success", "_report"})
"""Names of such a method in parts that have only that one."""
OWNERS = frozenset({"telemetry", "_telemetry", "log", "logs"})
PASSED_ON = {
    "hooks/engine/log_capture.py": "the records are those of hooks",
    "hooks/remote/servers.py": "it passes a report on to the log",
    "staging/problems.py": "its messages are constants of the part that makes it",
    "executor/rejections.py": "its messages are four constant texts, in a table for their ends",
}


def calls(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            owner = node.func.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if name in OWNERS:
                yield node


def is_constant(message: ast.expr) -> bool:
    """Report whether it is a text or a name in capitals, or one of two such."""
    if isinstance(message, ast.Constant):
        return isinstance(message.value, str)
    return isinstance(message, ast.Name) and message.id.isupper()


def test_no_part_reports_a_composed_text() -> None:
    checked, not_constant = 0, []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "event_loops.py":
            continue  # the reason why a hook failed, which is the value of a key
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in PARTS:
                checked += 1
                if node.args and isinstance(node.args[0], ast.JoinedStr | ast.BinOp):
                    not_constant.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not_constant == []
    assert checked > 20


def test_every_message_is_constant() -> None:
    checked, not_constant = 0, []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name in PASSED_ON or name.startswith("telemetry/"):
            continue
        for call in calls(path):
            checked += 1
            if not call.args or not is_constant(call.args[0]) or len(call.args) > 1:
                not_constant.append(f"{name}:{call.lineno}")
    assert not_constant == []
    assert checked > 100
