"""A custom transition: a class that says how a chunk acts on the state and on further state of its own.

All of the state of a head travels as one matrix, so initial and final states, packed documents and ranks are those of
any other variant:

    [ state     K x V | columns K x m ]
    [ rows      n x V | zeros         ]

A number is the first of a row of its own, the others of which are zeros: so it may decay as nothing else does.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor
from flexsp.compiler.backend.places import places
from flexsp.compiler.frontend.meta import CHUNK_STATE, STATE, Extent, InputMeta, Part
from flexsp.compiler.frontend.primitives import joined, part_of
from flexsp.compiler.frontend.program import Program
from flexsp.compiler.graphs.values import NotEmittable
from flexsp.grammar.decay import Decay

__all__ = ["CustomTransition"]

Tensor = torch.Tensor
Shape = tuple[str | int, ...]
_METHODS = ("chunk", "propagate", "output")
_TAKEN = {"q", "k", "v", "g", "state", "scale", "column", STATE, CHUNK_STATE, "cu_seqlens", "sp", "initial_state",
          "output_final_state", "given"}  # fmt: skip


class CustomTransition:
    """The user's class (an instance of it) checked, and compiled for the sizes of a call."""

    kind = "custom"
    rank = 1
    turns_with_keys = False  # nobody knows what its methods do to channels of keys

    def __init__(self, given: Any) -> None:
        self.made = given() if isinstance(given, type) else given
        self.name = type(self.made).__name__
        missing = [m for m in _METHODS if not callable(getattr(self.made, m, None))]
        if missing:
            self._fail(f"expected a class with the methods {', '.join(_METHODS)}, {missing[0]} is missing")
        for m in _METHODS:
            given_to = inspect.signature(getattr(self.made, m)).parameters.values()
            if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in given_to):
                self._fail(f"{m}: expected every argument by its name, got *args or **kwargs")
        self.chunk_size: int | None = getattr(self.made, "chunk_size", None)
        if self.chunk_size is not None and (type(self.chunk_size) is not int or self.chunk_size < 1):
            self._fail(f"chunk_size: expected a positive integer or None, got {self.chunk_size!r}")
        self.inputs = self._shapes("inputs", "()", '("K",)', '("V",)')
        self.extra = self._shapes("extra_state", '(n, "V")', '("V",)', '("K",)', '("K", m)', "()")
        for name, shape in self.extra.items():
            if name in self.inputs:
                self._fail(f"extra_state: expected another name than {name!r}, which is an input")
            if shape not in ((), ("K",)) and shape[-1] != "V" and not (len(shape) == 2 and shape[0] == "K"):
                kinds = 'rows (n, "V") or ("V",), columns ("K",) or ("K", m), or a number ()'
                self._fail(f"extra_state[{name!r}]: expected {kinds}, got {shape}")
        self._programs: dict[tuple[Any, ...], LinearAttention] = {}

    def _fail(self, text: str) -> None:
        raise ValueError(f"custom_transition {self.name}: {text}")

    def _shapes(self, attribute: str, *kinds: str) -> dict[str, Shape]:
        given = getattr(self.made, attribute, {})
        if not isinstance(given, Mapping):
            self._fail(f"{attribute}: expected a dict from names to shapes, got {given!r}")
        found = {}
        for name, shape in given.items():
            good = isinstance(shape, Sequence) and not isinstance(shape, str) and len(shape) <= 2
            if not good or any(n not in ("K", "V") and (type(n) is not int or n < 1) for n in shape):
                self._fail(f"{attribute}[{name!r}]: expected one of {', '.join(kinds)}, got {shape!r}")
            if not isinstance(name, str) or not name.isidentifier() or name in _TAKEN or name.startswith("chunk_"):
                self._fail(f"{attribute}: expected another name than {name!r}")
            found[name] = tuple(shape)
        return found

    def engine(self, decay: Decay, features: Any, masked: bool) -> None:
        """None: its methods are compiled."""
        if decay.trapezoidal:
            raise NotImplementedError("custom_transition with discretization='trapezoidal' is not there")

    @property
    def wants_gate(self) -> bool:
        """Whether a method takes the log gates."""
        return any("g" in inspect.signature(getattr(self.made, m)).parameters for m in _METHODS)

    def rows_and_columns(self, K: int, V: int) -> tuple[int, int]:
        """Sizes of the matrix that holds all of a head's state."""
        _, rows, columns = _laid_out(self.extra)
        return rows.number({"K": K, "V": V}), columns.number({"K": K, "V": V})

    def shapes(self, q: torch.Tensor, v: torch.Tensor) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes of a call's inputs, as numbers and as text."""
        found = {}
        for name, shape in self.inputs.items():
            text = ", ".join(["B", "T", "H", *map(str, shape)])
            found[name] = ((*q.shape[:3], *_numbers(shape, q.shape[3], v.shape[3])), f"[{text}]")
        return found

    @property
    def without_kernels(self) -> str | None:
        """Why no kernel holds the state, None where one does."""
        try:
            places(("K", "V"), _laid_out(self.extra)[0])
        except NotEmittable as error:
            return str(error)
        return None

    def explain(self) -> str:
        """How the state is laid out."""
        if not self.extra:
            return f"custom transition {self.name}, state [K, V]"
        parts = [
            f"{name} {list(shape)} as {'rows' if _is_rows(shape) else 'columns'}" if shape else f"the number {name}"
            for name, shape in self.extra.items()
        ]
        return f"custom transition {self.name}, state [K, V] and {', '.join(parts)}, in one matrix"

    def program(
        self, H: int, K: int, V: int, scale: float, gate: str | None, column: bool, fallback: str | None = None
    ) -> LinearAttention:
        """The compiled class; `gate` is "g" for gates a head, "gk" a channel or None; `column` as in programs."""
        key = (H, K, V, scale, gate, column, fallback)
        if key not in self._programs:
            self._programs[key] = self._make(*key)
        return self._programs[key]

    def _make(
        self, H: int, K: int, V: int, scale: float, gate: str | None, column: bool, fallback: str | None
    ) -> LinearAttention:
        h = ConstExpr("H", H)
        named: dict[Any, Any] = {"K": ConstExpr("K", K), "V": ConstExpr("V", V)}
        shapes: dict[str, Shape] = {"q": ("K",), "k": ("K",), "v": ("V",), **self.inputs}
        if gate is not None:
            shapes["g"] = () if gate == "g" else ("K",)
        if column:
            shapes["column"] = ()

        def meta(sizes: Mapping[Any, Any], state: Sequence[Any]) -> dict[str, Any]:
            tokens = {x: SymbTensor(["T", h, *(sizes.get(n, n) for n in shape)]) for x, shape in shapes.items()}
            return {**tokens, STATE: SymbTensor(["NS", h, *state]), "scale": scale}

        layout = _Layout(self.extra, K, V)
        phases = [_Phase(m, getattr(self.made, m), self.name, layout, column) for m in _METHODS]
        in_names = meta(named, list(named.values()))
        if self.extra:
            numbers = meta({"K": K, "V": V}, self.rows_and_columns(K, V))
            parts, _, _ = _laid_out(self.extra)
            made: LinearAttention = _Parted(numbers, phases, in_names, parts, fallback, self.chunk_size)
        else:
            made = LinearAttention(
                in_names, phases[0], phases[1], phases[2], fallback=fallback, chunk_size=self.chunk_size
            )  # fmt: skip
        for name in made.program.chunk.cached:
            if name in layout.names:
                self._fail(f"cache_result: expected another name than {name!r}, which is part of the state")
        return made


def _is_rows(shape: Shape) -> bool:
    """Whether extra state lies below the state; a number does."""
    return not shape or shape[-1] == "V"


def _numbers(shape: Shape, K: int, V: int) -> tuple[int, ...]:
    named = {"K": K, "V": V}
    return tuple(named[n] if isinstance(n, str) else n for n in shape)


def _laid_out(extra: Mapping[str, Shape]) -> tuple[tuple[Part, ...], Extent, Extent]:
    """Extra state as kernels know it, and the rows and columns of the matrix that holds all."""
    found, rows, columns = [], ["K"], ["V"]
    for name, shape in extra.items():
        along = rows if _is_rows(shape) else columns
        sizes = tuple(map(str, shape))
        found.append(Part(name, sizes, Extent(tuple(along))))
        along.append(sizes[0 if _is_rows(shape) else 1] if len(sizes) == 2 else "1")
    return tuple(found), Extent(tuple(rows)), Extent(tuple(columns))


class _Layout:
    """The state and what is beside it, as one matrix and apart."""

    def __init__(self, extra: dict[str, Shape], K: int, V: int) -> None:
        self.K, self.V = K, V
        self.places: dict[str, tuple[Any, ...]] = {}
        for part in _laid_out(extra)[0]:
            shape, first = extra[part.name], part.first.number({"K": K, "V": V})
            n = _numbers(shape, K, V)
            if _is_rows(shape):
                at = slice(first, first + n[0]) if len(n) == 2 else first
                self.places[part.name] = (at, slice(0, V) if n else 0)
            else:
                self.places[part.name] = (slice(0, K), slice(first, first + n[1]) if len(n) == 2 else first)

    @property
    def names(self) -> tuple[str, ...]:
        return ("state", *self.places)

    def apart(self, X: Tensor) -> dict[str, Tensor]:
        """The parts by name."""
        if not self.places:
            return {"state": X}
        places = [(slice(0, self.K), slice(0, self.V)), *self.places.values()]
        return {name: part_of(X, i, place) for i, (name, place) in enumerate(zip(self.names, places, strict=True))}

    def together(self, parts: Any) -> Tensor:
        """One matrix of the parts, in the order of `names`."""
        parts = tuple(parts) if isinstance(parts, (tuple, list)) else (parts,)
        if len(parts) != len(self.names):
            raise ValueError(f"expected {len(self.names)} results, {', '.join(self.names)}, got {len(parts)}")
        if not self.places:
            return parts[0]
        return joined(*parts, places=((slice(0, self.K), slice(0, self.V)), *self.places.values()))


class _Phase:
    """One method as a function that the compiler takes: the state is one matrix, q comes scaled. `role` is its name in
    the class."""

    def __init__(self, role: str, method: Callable[..., Any], owner: str, layout: _Layout, column: bool) -> None:
        self.role, self.method, self.layout, self.column = role, method, layout, column
        self.__name__ = f"{owner}.{role}"
        self.wanted = [n for n, p in inspect.signature(method).parameters.items() if p.default is p.empty]
        needed = dict.fromkeys(name for n in self.wanted for name in self._sources(n))
        if role == "propagate":
            needed.setdefault(STATE)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in needed])

    def _sources(self, name: str) -> tuple[str, ...]:
        if name in self.layout.names:
            return (STATE,) if self.role == "propagate" else (CHUNK_STATE,)
        if name.removeprefix("chunk_") in self.layout.names and name.startswith("chunk_"):
            return (CHUNK_STATE,)
        if name == "q":
            return ("q", "scale")
        return ("v", "column") if name == "v" and self.column else (name,)

    def __call__(self, **values: Any) -> Any:
        found = dict(values)
        if "q" in values:
            found["q"] = values["q"] * values["scale"]
        if "v" in values and self.column:
            found["v"] = values["v"] * values["column"][:, None]
        of_state = STATE if self.role == "propagate" else CHUNK_STATE
        if of_state in values:
            found |= self.layout.apart(values[of_state])
        if of_state == STATE and CHUNK_STATE in values:
            found |= {f"chunk_{name}": x for name, x in self.layout.apart(values[CHUNK_STATE]).items()}
        result = self.method(**{name: found[name] for name in self.wanted})
        return result if self.role == "output" else self.layout.together(result)


class _Parted(LinearAttention):
    """A state of several parts: one matrix for whoever calls it, each part by itself in the kernels."""

    def __init__(
        self, meta: dict[str, Any], phases: Sequence[Any], in_names: dict[str, Any], parts: tuple[Part, ...],
        fallback: str | None, chunk_size: int | None,
    ) -> None:  # fmt: skip
        super().__init__(meta, phases[0], phases[1], phases[2], fallback=fallback, chunk_size=chunk_size)
        self._named, self._parts = InputMeta.of(in_names), parts
        self._sizes |= self._named.sizes()
        self._of_state = {name: n[0] for name, n in self._named.sizes().items() if name != "H"}

    def _for_kernels(self) -> Program:
        outputs = self._named.state_sizes[1:]
        return dataclasses.replace(self.program, meta=self._named, value_sizes=tuple(outputs), parts=self._parts)

    def _known(self, tokens: dict[str, Tensor], params: dict[str, Tensor]) -> dict[str, int]:
        return super()._known(tokens, params) | self._of_state
