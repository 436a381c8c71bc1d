"""Repeats a parse that Python 3.11.0 to 3.11.7 spoils when two threads parse at the same time.

These releases count the depth of the parses of all threads in one number, and raise SystemError if that number is wrong
at the end of a parse: https://github.com/python/cpython/issues/106905. Triton parses a kernel to compute its cache key,
and remembers half a key if that fails. Any code that parses beside our compiling threads calls `ast.parse`, so this is
what is replaced.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["mend_parser", "persistent"]

_MISMATCH = "AST constructor recursion depth mismatch"
_PARSES = 200


def persistent(parse: Callable[..., Any]) -> Callable[..., Any]:
    """`ast.parse` that starts again if the parse of another thread spoiled it."""

    @functools.wraps(parse)
    def parse_again(*args: Any, **kwargs: Any) -> Any:
        for _ in range(_PARSES):
            try:
                return parse(*args, **kwargs)
            except SystemError as error:
                if _MISMATCH not in str(error):
                    raise
        return parse(*args, **kwargs)

    return parse_again


def mend_parser() -> None:
    """Replaces `ast.parse` in the releases that have the fault, once in a process."""
    if (3, 11) <= sys.version_info < (3, 11, 8) and not hasattr(ast.parse, "__wrapped__"):
        ast.parse = persistent(ast.parse)
