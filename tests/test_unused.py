"""No code of the product is used only by tests.

A module is reached from a command, a hook file or the author kit by imports. What it does when it is imported
is live. A function, class or constant is live if live code of its module names it, or live code of another
module imports it. A method is live if its class is live, and live code anywhere names it. Base classes from
other packages call methods by names that only they know, so methods of classes derived from them are live.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from proxy.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
ENTRIES = (
    "proxy.__main__",
    *(f"proxy.cli.{name.replace('-', '_')}" for name in COMMANDS),
    "proxy.config.child",
    "proxy.config.reference",
    "proxy.device_kit.api",
    "proxy.device_kit.testing",
    "proxy.hooks.api",
    "proxy.hooks.testing",
    "proxy.telemetry.reference",
)
"""What pyproject.toml, the command line, a reload and ``make`` name, and what authors import."""
CALLED_BY_NAME = (
    "proxy.demo.runtime_service.StandInService._",
    "proxy.replaced_files.ReplacedFilesGuard.find_spec",
)
"""What is called by a computed name, the method of an RPC, or by the interpreter."""
UNDER_WAY: tuple[str, ...] = ()
"""Modules that are being brought into use; each leaves this list with its first caller."""
PLAIN_BASES = ("Protocol", "Generic", "Enum", "IntEnum", "StrEnum", "NamedTuple", "TypedDict", "Exception")
"""Base classes from other packages that call no method by a name that only they know."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Piece:
    """A function, a method, a class, a constant, an import, or what a module does when it is imported."""

    module: str
    name: str
    owner: str = ""
    line: int = 0
    mentioned: set[str] = field(default_factory=set)
    imports: set[str] = field(default_factory=set)
    always: bool = False
    is_import: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{f'{self.owner}.' if self.owner else ''}{self.name}"

    def add(self, node: ast.AST) -> None:
        """Record what a part of the program mentions."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name):
                self.mentioned.add(inner.id)
            elif isinstance(inner, ast.Attribute):
                self.mentioned.add(inner.attr)
            elif isinstance(inner, ast.keyword) and inner.arg:
                self.mentioned.add(inner.arg)
            elif isinstance(inner, ast.ImportFrom) and inner.module:
                self.imports |= {f"{inner.module}.{alias.name}" for alias in inner.names}
            elif isinstance(inner, ast.Import):
                self.imports |= {alias.name for alias in inner.names}
            elif isinstance(inner, ast.Constant) and isinstance(inner.value, str) and len(inner.value) < 200:
                self.mentioned |= set(inner.value.split())
                self.imports.add(inner.value.partition(":")[0])  # a module that is imported by its name


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those under a condition too."""
    for node in body:
        if isinstance(node, ast.If):
            yield ast.Expr(node.test)
            yield from statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from statements([*node.body, *node.orelse, *node.finalbody])
        else:
            yield node


def pieces_of(module: str, tree: ast.Module) -> Iterator[Piece]:
    """Divide a module into pieces."""
    top = Piece(module, "<module>", always=True)
    yield top
    for node in statements(tree.body):
        if isinstance(node, Function):
            piece = Piece(module, node.name, line=node.lineno)
            piece.always = any(isinstance(d, ast.Call) for d in node.decorator_list)
            piece.add(node)
            yield piece
        elif isinstance(node, ast.ClassDef):
            yield from class_pieces(module, node, tree)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = alias.asname or alias.name
                yield Piece(module, name, imports={f"{node.module}.{alias.name}"}, is_import=True)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            if all(isinstance(t, ast.Name | ast.Tuple) for t in targets) and names != ["__all__"]:
                for name in names:
                    piece = Piece(module, name, line=node.lineno)
                    for part in (node.value, getattr(node, "annotation", None)):
                        if part is not None:
                            piece.add(part)
                    yield piece
            else:
                top.add(node)
        else:
            top.add(node)


def class_pieces(module: str, node: ast.ClassDef, tree: ast.Module) -> Iterator[Piece]:
    """Divide a class into itself and its methods."""
    whole = Piece(module, node.name, line=node.lineno)
    foreign = any(is_foreign(base, tree) for base in node.bases)
    for part in (*node.bases, *node.keywords, *node.decorator_list):
        whole.add(part)
    for inner in node.body:
        if isinstance(inner, Function):
            method = Piece(module, inner.name, node.name, inner.lineno)
            method.always = foreign or (inner.name.startswith("__") and inner.name.endswith("__"))
            method.always |= str(method).startswith(CALLED_BY_NAME)
            method.add(inner)
            yield method
        else:
            whole.add(inner)
    yield whole


def is_foreign(base: ast.expr, tree: ast.Module) -> bool:
    """Return whether a class of another package, which may call any method, is the base of another."""
    name = ast.unparse(base).partition("[")[0]
    if name in PLAIN_BASES or any(isinstance(n, ast.ClassDef) and n.name == name for n in tree.body):
        return False
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
    return not any(
        alias.name == name and str(n.module).startswith("proxy.") for n in imports for alias in n.names
    )


class Search:
    """The live pieces, extended until none is added."""

    def __init__(self, sources: Mapping[str, str], entries: Iterable[str], outside: Piece) -> None:
        self.sources = sources
        self.pieces = [p for name, text in sources.items() for p in pieces_of(name, ast.parse(text))]
        self.live: set[int] = set()
        self.reached: set[str] = set()
        self.classes: set[tuple[str, str]] = set()
        self.mentioned = set(outside.mentioned)
        self.imports = set(outside.imports)
        self.named: defaultdict[str, set[str]] = defaultdict(set)
        for entry in (*entries, *outside.imports):
            self.reach(entry)
        before = -1
        while len(self.live) > before:
            before = len(self.live)
            for piece in self.pieces:
                if id(piece) not in self.live:
                    self.enter(piece)

    def reach(self, name: str) -> None:
        """Record the import of a module, or of a name in one."""
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            if (part := ".".join(parts[:end])) in self.sources:
                self.reached.add(part)

    def enter(self, piece: Piece) -> None:
        """Record what a piece mentions, if it is live."""
        if piece.module not in self.reached or not self.is_live(piece):
            return
        self.live.add(id(piece))
        if piece.owner:
            self.mentioned |= piece.mentioned
            self.named[piece.module] |= piece.mentioned
        else:
            own = piece.mentioned - {piece.name}  # a function that only calls itself is not live
            self.mentioned |= own
            self.named[piece.module] |= own
            self.classes.add((piece.module, piece.name))
        self.imports |= piece.imports
        for name in piece.imports:
            self.reach(name)

    def unused(self) -> list[str]:
        """Return the modules that are not reached, and the pieces of other modules that are not live."""
        dead = [
            str(piece)
            for piece in self.pieces
            if piece.module in self.reached and id(piece) not in self.live and not piece.is_import
        ]
        return sorted({*self.sources} - self.reached) + sorted(dead)

    def is_live(self, piece: Piece) -> bool:
        if piece.owner:
            return (piece.module, piece.owner) in self.classes and (
                piece.always or piece.name in self.mentioned
            )
        if piece.always or piece.name in self.named[piece.module] or str(piece) in self.imports:
            return True
        return (
            piece.module in self.imports and piece.name in self.mentioned
        )  # used as an attribute of its module


def unused() -> list[str]:
    """Return the modules and pieces of the product that are not live."""
    sources = {}
    for path in sorted((ROOT / "proxy").rglob("*.py")):
        if ROOT / "proxy" / "api" not in path.parents:  # generated
            parts = path.relative_to(ROOT).with_suffix("").parts
            sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    outside = Piece("hooks", "shipped")
    for path in (ROOT / "hooks").rglob("*.py"):
        outside.add(ast.parse(path.read_text()))
    former = Piece("hooks", "former")
    for path in (ROOT / "tests/old_hooks").rglob("*.py"):
        former.add(ast.parse(path.read_text()))
    outside.imports |= (
        former.imports
    )  # their imports count; the functions that they call are also called by the current hooks
    outside.imports |= {f"{name}.{word}" for name in ENTRIES for word in exported(sources[name])}
    return Search(sources, ENTRIES, outside).unused()


def exported(source: str) -> list[str]:
    """Return the names in ``__all__`` of a module; a command is called by its own name."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [e.value for e in ast.walk(node.value) if isinstance(e, ast.Constant)]
    return ["main"]


def test_the_product_has_no_code_used_only_by_tests() -> None:
    found = unused()
    assert [name for name in found if name not in UNDER_WAY] == []
    assert set(UNDER_WAY) <= set(found), "a name that is used must leave the list"


def test_unused_code_is_reported() -> None:
    sources = {
        "proxy.main": "from proxy.parts import Used, work\nfrom proxy.parts import idle\nwork(Used().go())",
        "proxy.parts": """
LIMIT, UNUSED = 1, 2
def work(x): return helper(x)
def helper(x): return x + LIMIT
def idle(): return idle() + only_idle()
def only_idle(): return 0
class Used:
    def go(self): return self.step
    def step(self): pass
    def rest(self): pass
class Unused:
    def go(self): pass
""",
        "proxy.apart": "def work(): pass",
    }
    search = Search(sources, ["proxy.main"], Piece("", ""))
    assert search.unused() == [
        "proxy.apart",
        "proxy.parts.UNUSED",
        "proxy.parts.Unused",
        "proxy.parts.Unused.go",
        "proxy.parts.Used.rest",
        "proxy.parts.idle",
        "proxy.parts.only_idle",
    ]
