"""What may be changed in a file, one node of its syntax tree at a time.

Messages, annotations, names of types and decorators are left alone: changing them reports little about the
tests.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
REMOVABLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Continue, ast.Break, ast.Delete)
UNTOUCHED = (ast.JoinedStr, ast.Import, ast.ImportFrom)  # words for people, and what other lines need
SKIPPED_FIELDS = {"annotation", "returns", "decorator_list", "bases"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: where it is, what it says, and the whole text of the changed file."""

    path: str
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before} -> {self.after}"


def but(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what could stand in the place of a node."""
    yield from changed_operators(node)
    match node:
        case ast.Constant(value=bool() as value):
            yield but(node, value=not value)
        case ast.Constant(value=(int() | float()) as value):
            yield but(node, value=value + 1)
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Compare | ast.UnaryOp):
            yield but(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.comprehension(ifs=ifs):
            for i in range(len(ifs)):
                yield but(node, ifs=ifs[:i] + ifs[i + 1 :])
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield but(node, value=ast.Constant(None))
        case ast.Return(value=None):
            yield ast.Pass()
        case ast.Name(id=name) if name in NAMES:
            yield but(node, id=NAMES[name])
    if isinstance(node, REMOVABLE) and not is_text(node) and not is_type(node):
        yield ast.Pass()


def changed_operators(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                for other in COMPARISONS[type(op)]:
                    yield but(node, ops=[*ops[:i], other(), *ops[i + 1 :]])
        case ast.BoolOp(op=op, values=values):
            yield but(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
            for i in range(len(values)):
                rest = values[:i] + values[i + 1 :]
                yield rest[0] if len(rest) == 1 else but(node, values=rest)
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield but(node, op=OPERATORS[type(op)]())


def is_type(node: ast.AST) -> bool:
    """Return whether a statement names a type, which only annotations use.

    Such are ``Names = Mapping[str, str]`` and ``T = TypeVar("T")``.
    """
    match node:
        case ast.Assign(value=ast.Call(func=ast.Name(id="TypeVar"))):
            return True
        case ast.Assign(targets=targets, value=ast.Subscript() | ast.BinOp()):
            named = [target.id for target in targets if isinstance(target, ast.Name)]
            return any(name[0].isupper() and not name.isupper() for name in named)
    return False


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def nodes(parent: ast.AST, line: int = 1) -> Iterator[tuple[Any, Any, ast.AST, int]]:
    """Walk a tree: the holder of each node (a node or a list), its place in it, the node, its line."""
    for field, value in ast.iter_fields(parent):
        if field in SKIPPED_FIELDS:
            continue
        for key, node in enumerate(value) if isinstance(value, list) else [(field, value)]:
            if isinstance(node, ast.AST) and not isinstance(node, UNTOUCHED):
                here = getattr(node, "lineno", line)
                yield (value if isinstance(value, list) else parent), key, node, here
                yield from nodes(node, here)


def put(holder: Any, key: Any, node: ast.AST) -> None:
    if isinstance(holder, list):
        holder[key] = node
    else:
        setattr(holder, key, node)


def words(node: ast.AST) -> str:
    text = ast.unparse(node)
    first, more, _ = text.partition("\n")
    return f"{first} ..." if more else text


def mutants(root: Path, path: Path) -> Iterator[Mutant]:
    """Make every mutant of a file; ``path`` is below ``root``."""
    tree = ast.parse(path.read_text())
    name = path.relative_to(root).as_posix()
    for holder, key, node, line in list(nodes(tree)):
        for other in changes(node):
            put(holder, key, other)
            yield Mutant(name, line, words(node), words(other), ast.unparse(tree))
        put(holder, key, node)
