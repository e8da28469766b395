"""Bytecode for files that never change, the same each time it is made.

Without it, each start of a container compiles hundreds of modules: a container keeps no file that it writes.
The bytecode is not compared with its source (PEP 552, unchecked hash), so the times of files do not matter.

A new interpreter compiles, with fixed seeds and in a fixed order: what ``marshal`` writes also depends on
objects that already exist. Another patch version of Python may write other bytes, which work as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tree import Entry, Tree, write_tree

_COMPILE = """
import py_compile, sys
for line in sys.stdin:
    path = line.rstrip("\\n")
    try:
        py_compile.compile(
            path,
            dfile="/" + path,
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
    except py_compile.PyCompileError:
        continue
"""
"""Compiles the files that standard input names; a file that cannot be compiled is left out."""


def bytecode(tree: Mapping[str, Entry], python: str) -> Tree:
    """Return the bytecode of a tree's modules.

    Args:
        tree: The files; modules end with ``.py``.
        python: The version of Python that runs them.

    Returns:
        The compiled modules; nothing if this Python is another version, whose bytecode would be ignored.
    """
    if python != f"{sys.version_info[0]}.{sys.version_info[1]}":
        return {}
    sources = {path: tree[path] for path in sorted(tree) if path.endswith(".py") and not tree[path].link}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_tree(sources, root, 0)
        environment = {"PATH": os.environ.get("PATH", ""), "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
        command = [sys.executable, "-S", "-s", "-W", "ignore", "-c", _COMPILE]
        names = "".join(f"{path}\n" for path in sources)
        subprocess.run(command, input=names, text=True, cwd=root, env=environment, check=True)
        return {str(path.relative_to(root)): Entry(path.read_bytes()) for path in sorted(root.rglob("*.pyc"))}
