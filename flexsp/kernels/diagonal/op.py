"""Entry of the diagonal engine: chooses the Triton kernels or PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flexsp.comm.derivatives import IN_PYTORCH, untransformed
from flexsp.exceptions import kernels_on_cpu
from flexsp.kernels import functions, operators
from flexsp.kernels.diagonal import in_pytorch
from flexsp.kernels.diagonal.plan import NAME, make_plan
from flexsp.kernels.functions import Like
from flexsp.kernels.operators import Asked, Kept

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel
    from flexsp.kernels.diagonal.launches import DiagonalCall
    from flexsp.kernels.recipe import Recipe

__all__ = ["diagonal"]

_KIND = "diagonal"
Optional = torch.Tensor | None


class _Diagonal:
    """Calls of q, k, v and, where the state decays, of "g" or "g_gamma". Named "gate|rows|call": the rows of a token
    and the text of the call."""

    def __init__(self, name: str) -> None:
        self.gate, rows, self.text = name.split("|", 2)
        self.rows = int(rows)

    def recipe(self, asked: Asked) -> Recipe[DiagonalCall]:
        from flexsp.kernels.diagonal.dispatch import recipe_of

        given = dict(zip(("q", "k", "v", self.gate), asked.tensors, strict=False))
        sp_id = -1 if asked.group is None else asked.group.id
        return recipe_of(given, asked.initial, asked.docs, asked.scale, asked.want_final, sp_id, self.text)

    def forward(self, asked: Asked) -> tuple[torch.Tensor, Optional, torch.Tensor, Optional]:
        return operators.outputs(self.recipe(asked), asked, _shard(asked, self.rows))

    def backward(self, asked: Asked, kept: Kept, *others: Any) -> tuple[list[Optional], Optional]:
        return operators.gradients(self.recipe(asked), asked.tensors, asked.initial, kept, *others)

    def like_forward(self, asked: Asked) -> tuple[torch.Tensor, ...]:
        from flexsp.kernels.diagonal.launches import DiagonalCall

        q, _, v, *_ = asked.tensors
        p, gate, given = make_plan(q, v, asked.docs), self.gate or None, asked.initial is not None
        call = DiagonalCall(p, q.dtype, gate, asked.scale, given, asked.want_final, False, self.text, v.dtype)
        states = (asked.docs or p.B, p.H, p.K, p.V) if asked.want_final else 0
        return (
            v.new_empty(p.B, p.T, p.H, p.V),
            q.new_empty(states, dtype=torch.float32),
            q.new_empty(call.saved_bytes, dtype=torch.uint8),
            q.new_empty((p.n_chunks, 5) if asked.docs else 0, dtype=torch.int32),
        )


def _shard(asked: Asked, rows: int) -> operators.Shard:
    """Which rows of how many these are; ranks tell each other where documents are packed."""
    T = asked.tensors[0].shape[1]
    return asked.group.shard_range(T, rows) if asked.docs and asked.group is not None else (0, T, T)


operators.define_kind(_KIND, _Diagonal, NAME, IN_PYTORCH)
operators.serve(3)
operators.serve(4)


class _InPytorch:
    """The same calls where no kernels run them."""

    def run(self, how: str, asked: Asked) -> tuple[torch.Tensor, Optional]:
        gate, rows, text = how.split("|", 2)
        given = dict(zip(("q", "k", "v", gate), asked.tensors, strict=False))
        q, k, v, g, g_gamma = (given.get(x) for x in ("q", "k", "v", "g", "g_gamma"))
        assert q is not None and k is not None and v is not None
        return in_pytorch.run(
            q, k, v, g, g_gamma, asked.scale, asked.initial, asked.cu_seqlens, asked.group, text, asked.want_final,
            int(rows),
        )  # fmt: skip

    def like(self, how: str, asked: Asked) -> Like:
        q, _, v, *_ = asked.tensors
        (B, T, H, K), V = q.shape, v.shape[-1]
        states = asked.docs or B, H, K, V
        return Like((B, T, H, V), v.dtype, states, torch.promote_types(q.dtype, torch.float32))


functions.define(_KIND, _InPytorch())


def _use_triton(q: torch.Tensor) -> bool:
    if q.dtype == torch.float64:
        return False
    return q.is_cuda or kernels_on_cpu()


def diagonal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    *,
    scale: float,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    sp: SequenceParallel | None = None,
    op: str = "linear attention",
    rows: int = 1,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """S_t = e^{g_t} S_{t-1} + k_t v_t^T, o_t = scale q_t S_t, over [B, T, H, *] inputs already validated.

    v may be in float32 beside q and k in bfloat16, and then o is too; states of one column are summed up in float32.
    ``op`` is the name by which ranks tell each other which call they are in. A token of `sp.set_lengths` is ``rows``
    of T; ``cu_seqlens`` count those too.
    """
    gates = [name for name, x in (("g", g), ("g_gamma", g_gamma)) if x is not None]
    call = f"{op} on {q.dtype}, {' and '.join(gates) or 'no gate'}{', packed' if cu_seqlens is not None else ''}"
    if type(scale) is float:  # else symbolic
        call += f", scale {scale}"
    if not _use_triton(q) and not functions.in_graph():
        if sp is not None and cu_seqlens is not None and not cu_seqlens.is_cuda and not torch.compiler.is_compiling():
            call += f", boundaries {cu_seqlens.tolist()}"
        with torch.autocast(q.device.type, enabled=False):  # states stay in fp32, as in the kernels
            return in_pytorch.run(
                q, k, v, g, g_gamma, scale, initial_state, cu_seqlens, sp, call, output_final_state, rows
            )  # fmt: skip
    if _use_triton(q):
        untransformed(NAME, IN_PYTORCH)
    want_final = output_final_state and (sp is None or cu_seqlens is not None or sp.rank == sp.world_size - 1)
    initial = None if initial_state is None else initial_state.contiguous()
    gate = g if g is not None else None if g_gamma is None else g_gamma.contiguous()
    tensors, name = [q, k, v, *([] if gate is None else [gate])], f"{''.join(gates[:1])}|{rows}|{call}"
    if not _use_triton(q):
        return functions.call(
            _KIND, name, tensors, initial, cu_seqlens, scale=scale, want_final=want_final, sp=sp,
        )  # fmt: skip
    if not operators.plain(*tensors, initial, cu_seqlens):
        return operators.call(
            f"{_KIND}|{name}", tensors, initial, cu_seqlens, scale=scale, want_final=want_final, sp=sp,
        )  # fmt: skip
    docs = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    asked = Asked(tensors, initial, cu_seqlens, docs, scale, want_final, sp)
    recipe = _Diagonal(name).recipe(asked)
    return operators.run(recipe, f"{_KIND}|{name}", tensors, initial, cu_seqlens, _shard(asked, rows), scale)
