"""Replaces `torch.einsum` of two operands by products, sums and transposes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

__all__ = ["expand_einsum"]

_FORM = re.compile(r"([a-zA-Z]{1,2}),([a-zA-Z]{1,2})->([a-zA-Z]{0,2})")


def expand_einsum(node: Node) -> Node | None:
    """A node with the same value, inserted before `node`; None if a tile of it would have three axes."""
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or not all(isinstance(x, Node) for x in operands):
        return None
    found = _FORM.fullmatch(_explicit(equation))
    if found is None or any(len(set(letters)) != len(letters) for letters in found.groups()):
        return None
    left, right, out = found.groups()

    def call(target: Callable[..., Any] | str, *args: Any) -> Any:
        with node.graph.inserting_before(node):
            new = node.graph.create_node("call_method" if isinstance(target, str) else "call_function", target, args)
        new.meta = dict(node.meta)
        return new

    a, left = _summed(call, operands[0], left, right + out)
    b, right = _summed(call, operands[1], right, left + out)
    inside = [x for x in left if x in right and x not in out]
    if len(inside) == 1 and len(left) == len(right) == len(out) == 2:
        if out[0] in right:
            a, left, b, right = b, right, a, left
        a = a if left[1] == inside[0] else call("t", a)
        b = b if right[0] == inside[0] else call("t", b)
        return call(torch.matmul, a, b)
    order = [*out, *inside]
    if len(order) > 2:
        return None
    product = call(torch.mul, _aligned(call, a, left, order), _aligned(call, b, right, order))
    return call(torch.sum, product, list(range(len(out), len(order)))) if inside else product


def _explicit(equation: str) -> str:
    """The equation with its result written out: letters that occur once, in alphabetical order."""
    equation = equation.replace(" ", "")
    once = sorted(x for x in equation if x.isalpha() and equation.count(x) == 1)
    return equation if "->" in equation else f"{equation}->{''.join(once)}"


def _summed(call: Callable[..., Any], x: Any, letters: str, wanted: str) -> tuple[Any, str]:
    """x summed over its letters that are not in `wanted`, and the letters left."""
    alone = [axis for axis, letter in enumerate(letters) if letter not in wanted]
    return (call(torch.sum, x, alone) if alone else x), "".join(letter for letter in letters if letter in wanted)


def _aligned(call: Callable[..., Any], x: Any, letters: str, order: list[str]) -> Any:
    """x with its axes in this order; axes that it lacks have size 1."""
    if [letter for letter in order if letter in letters] != list(letters):
        x = call("t", x)
    for axis, letter in enumerate(order):
        x = x if letter in letters else call("unsqueeze", x, axis)
    return x
