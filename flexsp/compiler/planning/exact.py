"""The launches that do segments again token by token, behind those of the same kind.

Their kernels are those of `flexsp.compiler.backend.exact`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch

from flexsp.compiler.backend.exact import EXACT
from flexsp.compiler.backend.generated_kernels import Generated
from flexsp.kernels.launch_plan import LaunchPlan
from flexsp.kernels.launch_spec import Launch, LaunchSpec

__all__ = ["ExactSegments"]

_NARROWEST = 16  # columns of the state, as many as products of tiles need
_WARP = 512  # numbers of the state that a warp has
_TILE = 2048  # that a program of `grads` has, which holds three of them: more spill
_PROGRAMS = 512  # of `grads`, in all: four for each multiprocessor of the largest GPUs
_GROUP = 8


class ExactSegments(LaunchPlan):
    """The part of a generated call's plan that does segments again.

    Attributes:
        code: the kernels of the program.
        sizes: of the state and the inputs, by name.
    """

    code: Generated
    sizes: Mapping[str, int]

    @property
    @abstractmethod
    def products(self) -> torch.dtype:
        """The dtype of products."""

    @abstractmethod
    def of_tokens(
        self, kind: str, how: Launch, grid: tuple[int, ...], others: Sequence[str | None], reads: Sequence[str],
        writes: Sequence[str], flags: Mapping[str, bool],
    ) -> LaunchSpec:  # fmt: skip
        """The launch of a kernel that goes token by token; `others` are its last pointers."""

    @property
    def rounds(self) -> bool:
        """Whether the call has inverses that are rounded. In other dtypes products are of fp32."""
        return self.code.inverts and self.products == torch.bfloat16 and self.n_chunks > 0

    def choose(self) -> list[LaunchSpec]:
        """Which segments are done again."""
        if not self.rounds:
            return []
        from flexsp.kernels.delta.base_plan import choose

        return [choose(self)]

    def again(
        self, kind: str, others: Sequence[str | None], reads: Sequence[str], writes: Sequence[str],
        flags: Mapping[str, bool],
    ) -> list[LaunchSpec]:  # fmt: skip
        """A walk of this kind once more, with the same last pointers."""
        if not self.rounds:
            return []
        code, (rows, cols) = self.code, self._tile()
        width = max(_NARROWEST, _WARP // rows)
        width = min(cols, width) if code.split_tokens else cols
        how = Launch(width, min(16, max(1, rows * width // _WARP)), 1)
        panels = -(-self.sizes[code.layout.cols] // width)
        if kind == "summarize" and code.dense:
            panels += -(-self.state[0] // width)
        grid = panels, self.B * self.H, self.n_seg
        return [self.of_tokens(f"{EXACT}{kind}", how, grid, ["@exact", *others], reads, writes, flags)]

    def grads(self) -> list[LaunchSpec]:
        """All gradients of inputs, of chunks that are done again."""
        if not self.rounds:
            return []
        others = ["@exact", "@scratch", "@entering", "@leaving", "@table" if self.n_docs else None]
        grid = self._programs(), self.B * self.H, 1
        reads = "@entering", "@leaving"
        return [self.of_tokens(f"{EXACT}grads", self._of_grads(), grid, others, reads, ("@scratch",), {})]

    def scratch(self) -> tuple[int, ...]:
        """Numbers in fp32 that `grads` adds up where it has some of the state's columns at a time; else it needs none.
        """
        cols = self.code.layout.cols
        tokens = [sizes for name, sizes in self.code.layout.tokens.items() if name != "do" and cols not in sizes]
        width = sum(self.sizes[sizes[1]] if len(sizes) == 2 else 1 for sizes in tokens)
        if self._of_grads().cols >= self.sizes[cols]:
            return (1,)
        return self.B * self.H * self._programs(), self.chunk, max(1, width)

    def _tile(self) -> tuple[int, int]:
        """Rows and columns of a tile of the whole state."""
        blocks, layout = dict(self.tiling.blocks), self.code.layout
        return blocks.get(layout.rows, 1), blocks[layout.cols]

    def _of_grads(self) -> Launch:
        rows, cols = self._tile()
        width = min(cols, max(_NARROWEST, _TILE // rows)) if self.code.split_tokens else cols
        return Launch(width, min(16, max(1, rows * width // _WARP)), 1)

    def _programs(self) -> int:
        """For each sequence of a head."""
        groups = -(-self.n_chunks // _GROUP)
        return max(1, min(groups, _PROGRAMS // max(1, self.B * self.H)))
