"""Places of a state's parts: in a walk's registers each is a tile, in memory they form one matrix.

    [ S     K x V | columns [K] ]
    [ rows        | nothing     ]

Rows are [K, V], [V] or a number, which is followed by nothing: each has a decay of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexsp.compiler.frontend.meta import Extent, Part
from flexsp.compiler.graphs.values import NotEmittable

__all__ = ["Place", "matrix", "places"]


@dataclass(frozen=True)
class Place:
    """One part: `suffix` of its names, its sizes and tile shape, and the arguments that `load_state` takes for it.

    A number has no tile shape and no arguments. `of_columns`: a program of a walk has the columns from v0 on; else it
    has all, and only the first one stores them.
    """

    suffix: str
    sizes: tuple[str, ...]
    shape: str
    offset: str
    stride: str
    arguments: str
    of_columns: bool

    @property
    def zeros(self) -> str:
        return f"tl.zeros([{self.shape}], tl.float32)" if self.sizes else "tl.full((), 0.0, tl.float32)"

    def load(self, base: str, first: str = "v0") -> str:
        """Code for its tile of the matrix at `base`."""
        if not self.sizes:
            return f"tl.load({base}{self.offset}).to(tl.float32)"
        return f"load_state({base}{self.offset}, 0, {first if self.of_columns else 0}, True, {self.arguments})"

    def store(self, base: str, text: str) -> str:
        if not self.sizes:
            return f"tl.store({base}{self.offset}, {text}, mask=v0 == 0)"
        at, when = ("v0", "True") if self.of_columns else ("0", "v0 == 0")
        return f"store_state({base}{self.offset}, {text}, 0, {at}, {when}, {self.arguments})"


def matrix(state: Sequence[str], parts: Sequence[Part]) -> tuple[Extent, ...]:
    """Sizes of the matrix that holds a state and its parts."""
    if not parts:
        return tuple(Extent((size,)) for size in state)
    K, V = state
    rows, cols = [K], [V]
    for part in parts:
        if part.sizes == (K,):
            cols.append("1")
        else:
            rows.append(K if len(part.sizes) == 2 else "1")
    return Extent(tuple(rows)), Extent(tuple(cols))


def places(state: Sequence[str], parts: Sequence[Part], flip: bool = False) -> list[Place]:
    """The state itself and then its parts. `flip`: the state is held transposed.

    Raises:
        NotEmittable: a part that no kernel holds.
    """
    V = state[-1]
    if len(state) == 1:
        return [Place("", (V,), f"B{V}", "", "1", f"None, {V}, None, B{V}", True)]
    K, width = state[0], str(matrix(state, parts)[1])
    apart = "" if width == V else f", False, {width}"
    whole = f"{K}, {V}, B{K}, B{V}"
    shape = f"B{V}, B{K}" if flip else f"B{K}, B{V}"
    found = [Place("", (K, V), shape, "", width, whole + (", True" if flip else apart), True)]
    for part in parts:
        name = f"__{part.name}"
        if part.sizes == (K, V):
            found.append(Place(name, (K, V), shape, f" + {part.first} * {width}", width, whole + apart, True))
        elif part.sizes == (V,):
            given = f"None, {V}, None, B{V}"
            found.append(Place(name, (V,), f"B{V}", f" + {part.first} * {width}", "1", given, True))
        elif part.sizes == (K,):
            given = f"None, {K}, None, B{K}, False, {width}"
            found.append(Place(name, (K,), f"B{K}", f" + {part.first}", width, given, False))
        elif not part.sizes:
            found.append(Place(name, (), "", f" + {part.first} * {width}", "", "", False))
        else:
            got = ", ".join(part.sizes)
            raise NotEmittable(
                f"{part.name}: kernels hold extra state [{K}, {V}], [{V}], [{K}] or (), a number, got [{got}]; give "
                "each row or column a name of its own"
            )
    return found

