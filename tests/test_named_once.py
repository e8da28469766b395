"""Definitions that occur once in the product: gRPC status codes, groups of error numbers, atomic writes."""

from __future__ import annotations

import ast
import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from proxy.model.grpc_status import GrpcStatus

PROXY = Path(__file__).parents[1] / "proxy"
RENAMES = {
    "atomic_write.py": "it is the helper",
    "cli/hooks/file_commands.py": "a symbolic link",
    "sockets/unix_socket.py": "a socket",
    "sockets/grpc_socket.py": "a socket",
    "backends/ledger/opening.py": "a damaged file is kept under another name",
    "backends/cgroup/fake/cpuset.py": "directories",
    "attach/journal.py": "directories",
}
"""Where something is renamed or linked, and why that is no atomic write of a file."""


def modules() -> Iterator[tuple[str, str]]:
    for path in sorted(PROXY.rglob("*.py")):
        if PROXY / "api" not in path.parents:  # generated
            yield str(path.relative_to(PROXY)), path.read_text()


def assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a statement binds, each with its value."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        targets, value = [node.target], node.value
    elif isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    else:
        return
    for target in targets:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            yield from ((ast.unparse(t), v) for t, v in zip(target.elts, value.elts, strict=True))
        else:
            yield ast.unparse(target), value


def is_code(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and type(value.value) is int and 0 <= value.value <= 16


def status_codes(source: str) -> list[int]:
    """Return the lines that define a status code again, or list one of its names with a number."""
    found, tree = [], ast.parse(source)
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]:
        lines = [
            statement.lineno
            for statement in scope.body
            for name, value in assigned(statement)
            if name.strip("_") in GrpcStatus.__members__ and is_code(value)
        ]
        if scope is tree or len(lines) > 2:  # an enumeration of something else may share a name or two
            found += lines
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            names = [v.value for k, v in pairs if k and is_code(k) and isinstance(v, ast.Constant)]
            found += [node.lineno] * any(name in GrpcStatus.__members__ for name in names)
        if isinstance(node, ast.Compare) and ast.unparse(node.left).endswith((".code", "status")):
            sides = [e for c in node.comparators for e in (c.elts if isinstance(c, ast.Tuple) else [c])]
            found += [node.lineno] * any(is_code(s) and ast.unparse(s) != "0" for s in sides)
    return sorted(set(found))


def errno_groups(source: str) -> list[int]:
    """Return the lines with a collection of several numbers of ``errno``."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Tuple | ast.List | ast.Set)
        and sum(ast.unparse(e).startswith("errno.E") for e in node.elts) > 1
    ]


def renames(source: str) -> list[int]:
    """Return the lines on which a file gets another name, or one of its own."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = ast.unparse(node.func.value), node.func.attr
            is_path_method = name in ("rename", "replace") and len(node.args) == 1 and not node.keywords
            is_os_call = owner == "os" and name in ("rename", "replace", "link", "renames")
            if is_os_call or (is_path_method and owner != "dataclasses"):
                found.append(node.lineno)
    return sorted(set(found))


def test_status_codes_are_those_of_grpc() -> None:
    assert {status.name: status.value for status in GrpcStatus} == {
        status.name: status.value[0] for status in grpc.StatusCode
    }


@pytest.mark.parametrize(
    ("find", "samples"),
    [
        (status_codes, ["NOT_FOUND = 5", "OK, _INTERNAL = 0, 13", "C = {3: 'INVALID_ARGUMENT'}"]),
        (status_codes, ["if error.code == 5: pass", "x = status in (OK, 5)", "_NOT_FOUND: Final = 5"]),
        (errno_groups, ["GONE = (errno.ENOENT, errno.ENODEV)", "x in {errno.EACCES, errno.EPERM}"]),
        (renames, ["draft.replace(path)", "os.link(a, b)", "Path(a).rename(b)", "os.replace(a, b)"]),
    ],
)
def test_another_definition_is_found(find: Callable[[str], list[int]], samples: list[str]) -> None:
    assert [find(sample) for sample in samples] == [[1]] * len(samples)


def test_each_definition_is_unique() -> None:
    finders = (status_codes, errno_groups, renames)
    found = {find.__name__: {name for name, source in modules() if find(source)} for find in finders}
    assert found["status_codes"] == {"model/grpc_status.py"}
    assert found["errno_groups"] == {"model/errnos.py"}
    assert found["renames"] == set(RENAMES)


def test_each_group_of_error_numbers_differs() -> None:
    from proxy.model import errnos

    groups = [frozenset(v) for k, v in vars(errnos).items() if k.isupper()]
    assert len(groups) == len(set(groups)) > 1
    assert all(number in errno.errorcode for group in groups for number in group)
