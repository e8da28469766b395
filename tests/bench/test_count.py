from __future__ import annotations

from bench.count import code_lines, inner_imports

SOURCE = '''"""A module.

With more.
"""
# a comment
import os

NAME = """not
a docstring"""
"""A docstring of NAME."""


def work():  # another
    """Do it."""
    from proxy.model import errors
    import proxy.engine

    def inner():
        from proxy.model import errors

    return (1,
            2)
'''


def test_code_lines_exclude_blanks_comments_and_docstrings() -> None:
    assert code_lines(SOURCE) == 10
    assert code_lines('"""Nothing."""\n\n# at all\n') == 0


def test_imports_in_functions_are_counted_once() -> None:
    assert inner_imports(SOURCE) == 2
    assert inner_imports("from proxy.model import errors\n") == 0
