"""Why no kernels are made: messages name the user's function, line and variables, and a remedy, and nothing of ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor, cache_result, identity, unit_lower_inverse
from flexsp.compiler.frontend.meta import KERNELS_OWN, OURS
from flexsp.exceptions import CompileError

H, K, V = ConstExpr("H", 2), ConstExpr("K", 4), ConstExpr("V", 5)


def chunk(k: Any, v: Any) -> Any:
    return k.T @ v


def decay(prev_s: Any, chunk_state: Any) -> Any:
    return prev_s + chunk_state


def merge(q: Any, k: Any, v: Any, chunk_state: Any) -> Any:
    return (q @ k.T).tril(0) @ v + q @ chunk_state


def _model(
    chunk: Callable[..., Any] = chunk, decay: Callable[..., Any] = decay, merge: Callable[..., Any] = merge,
    K: Any = K, V: Any = V, inputs: Mapping[str, SymbTensor] | None = None, **more: SymbTensor,
) -> LinearAttention:  # fmt: skip
    meta = {"q": SymbTensor(["T", H, K]), "k": SymbTensor(["T", H, K]), "v": SymbTensor(["T", H, V]), **more}
    meta |= inputs or {}
    return LinearAttention(meta | {"prev_s": SymbTensor(["NS", H, K, V])}, chunk, decay, merge, chunk_size=64)


def _inverse_of_channels(k: Any, v: Any) -> Any:
    cache_result(unit_lower_inverse(identity(k, k.size(1)) + (k.T @ k).tril(-1)), "mixing")
    return k.T @ v


def _mixed(prev_s: Any, mixing: Any, chunk_state: Any) -> Any:
    return prev_s + mixing @ chunk_state


def _silently_inverted(k: Any, v: Any) -> Any:
    return unit_lower_inverse(identity(k, k.size(1)) + (k.T @ k).tril(-1)) @ k.T @ v


def _bent(prev_s: Any, chunk_state: Any) -> Any:
    return prev_s.tanh() + chunk_state


def _flipped(k: Any, v: Any) -> Any:
    return k.flip(1).T @ v


def _caching(k: Any, v: Any) -> Any:
    cache_result(2 * k, "gates_k")
    return k.T @ v


def _cached(q: Any, v: Any, gates_k: Any, chunk_state: Any) -> Any:
    return (q @ gates_k.T).tril(0) @ v + q @ chunk_state


def _cumulated(k: Any, v: Any) -> Any:
    return k.cumprod(0).T @ v


def _to_a_power(k: Any, v: Any) -> Any:
    return ((k * k) ** 0.3).T @ v


def _mixed_rows(k: Any, v: Any, two: Any) -> Any:
    return k.T @ (v * two.sum((1, 2))[:, None])


def _of_a_matrix(q: Any, k: Any, v: Any, m: Any, chunk_state: Any) -> Any:
    return (q @ m.sum(0) @ k.T).tril(0) @ v + q @ chunk_state


def _keys(q: Any, k: Any, v: Any, chunk_state: Any) -> Any:
    return (q @ k.T).tril(0) @ k + (q @ chunk_state).sum(-1)[:, None]


def _of_values(prev_s: Any, k: Any, v: Any, chunk_state: Any) -> Any:
    return prev_s - k.T @ (k @ prev_s) * v.sum().sigmoid() + chunk_state


CASES: dict[str, tuple[Callable[[], LinearAttention], tuple[str, ...]]] = {
    "an inverse of [K, K]": (
        lambda: _model(_inverse_of_channels, decay=_mixed),
        ("test_messages.py", "unit_lower_inverse(identity(k, k.size(1))", "inverses of [C, C] only"),
    ),
    "an inverse that is not cached": (lambda: _model(_silently_inverted), ("unit_lower_inverse", "inverses of [C, C]")),
    "not affine": (lambda: _model(decay=_bent), ("'_bent'", "prev_s.tanh()", "not affine")),
    "an operator": (lambda: _model(_flipped), ("flip", "k.flip(1).T @ v")),
    "an operator with another way": (lambda: _model(_cumulated), ("cumprod", "x.log().cumsum(0)", "k.cumprod(0)")),
    "a power": (lambda: _model(_to_a_power), ("the power 0.3", "multiples of 0.5 up to 8", "** 0.3", ".exp() is the")),
    "tokens that are tiles": (
        lambda: _model(_mixed_rows, two=SymbTensor(["T", H, K, V])),
        ("two: kernels take tokens [T, H] or [T, H, N], got [T, H, K, V]", "rows=n"),
    ),
    "a parameter of three axes": (
        lambda: _model(merge=_of_a_matrix, m=SymbTensor([H, K, K, K])),
        ("m: kernels take parameters [H], [H, N] or [H, N, M], got [H, K, K, K]", "before the call"),
    ),
    "outputs of keys": (lambda: _model(merge=_keys), ("outputs are [C, K], at", "test_messages.py", "need [C, V]")),
    "a matrix made of values": (lambda: _model(decay=_of_values), ("depends on 'v'", "make it of keys, gates")),
    "a number as a size": (lambda: _model(K=4), ("the sizes 4", "ConstExpr('K', 4)")),
    "a size of the code's": (lambda: _model(K=ConstExpr("n", 4)), ("the size 'n'", "choose another name")),
    "one size twice": (lambda: _model(V=K), ("[K, K]", "ConstExpr('V', 64)")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_no_kernels(name: str) -> None:
    make, words = CASES[name]
    reason = make()._generated
    assert isinstance(reason, str), "kernels are made after all: choose another case"
    for word in words:
        assert word in reason, reason
    for text in re.findall(r"\w+", re.sub(r"\(.*?\)|'\w+'", "", reason)):
        assert not OURS.match(text), reason
    assert "|" not in reason and "\\" not in reason, f"a pattern is no message: {reason}"


@pytest.mark.parametrize("name", [*KERNELS_OWN, "K", "d_k", "gates_k", "S__k", "dS__k", "sum0"])
def test_names_of_inputs_that_kernels_have(name: str) -> None:
    message = f"^input_meta '{name}': expected another name: kernels have variables B, C, K, S, T, V, dS, do, o, names"
    for weights, kind in ((f"{name}[:, None]", SymbTensor(["T", H])), (name, SymbTensor([H, V]))):
        with pytest.raises(CompileError, match=message):
            _model(eval(f"lambda k, v, {name}: k.T @ (v * {weights})"), inputs={name: kind})


def test_a_cached_result_named_like_one_of_the_code() -> None:
    with pytest.raises(CompileError, match="cache_result name 'gates_k': expected another: kernels have variables"):
        _model(_caching, merge=_cached)


@pytest.mark.parametrize("name", ["input", "mul", "exp_1", "Wq"])
def test_names_of_inputs_that_graphs_write_their_own_way(name: str) -> None:
    """Such as those that Python and operators have."""
    model = _model(eval(f"lambda k, v, {name}: (k * {name}.exp()).T @ v"), inputs={name: SymbTensor(["T", H, K])})
    assert model.kernels.layout.tokens[name] == ("C", "K")


def _from_the_right(prev_s: Any, v: Any, chunk_state: Any) -> Any:
    return prev_s @ (v.T @ v) + chunk_state


def _sees_all(q: Any, k: Any, v: Any, chunk_state: Any) -> Any:
    return (q @ k.T) @ v + q @ chunk_state


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ({"decay": _from_the_right}, ("'_from_the_right'", "prev_s @ (v.T @ v)", "transposed")),
        ({"merge": _sees_all}, ("'_sees_all'", "(q @ k.T) @ v", "tril(0)")),
        ({"merge": lambda q, k, v, chunk_state: (q @ chunk_state).sum()}, ("expected a result [C, V]", "chunk_state")),
    ],
)
def test_what_is_refused_names_the_line(functions: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(CompileError) as caught:
        _model(**functions)
    for word in (*words, "test_messages.py:"):
        assert word in str(caught.value), caught.value
