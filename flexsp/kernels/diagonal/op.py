"""Entry of the diagonal engine: chooses the Triton kernels or PyTorch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from flexsp.kernels import functions
from flexsp.kernels.columns import ColumnBlocks
from flexsp.kernels.diagonal import in_pytorch
from flexsp.kernels.diagonal.tiling import NAME, make_tiling
from flexsp.kernels.engine import Engine, asks_for_kernels, neighbours, register
from flexsp.kernels.functions import Like
from flexsp.kernels.operators import plain

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel
    from flexsp.kernels.diagonal.diagonal_plan import DiagonalPlan
    from flexsp.kernels.operators import Asked

__all__ = ["Diagonal", "Ssd", "diagonal", "diagonal_pair", "ssd"]


class Diagonal(Engine):
    """Calls of q, k, v and, where they are there, of "g" [B, T, H] or "g_gamma" [H], by which the state decays, of "i"
    [B, T, H], log weights of keys, of "w" [B, T, H], by which outputs have v besides, and of "turned" and
    "turned_values" [B, T, H, S], by which tokens rotate the state's rows and columns. The form is
    "names|rows|strict|description": those that are there, the rows of a token, "strict" or nothing, and what ranks
    compare of the call."""

    kind, title = "diagonal", NAME
    params = frozenset(("g_gamma",))

    def __init__(self, form: str) -> None:
        self.form = form
        names, rows, strict, self.description = form.split("|", 3)
        self.rows, self.strict, self.names = int(rows), bool(strict), ("q", "k", "v", *_split(names))
        self.gate = next((name for name in self.names if name in ("g", "g_gamma")), None)
        self.turned, self.turned_values = (x if x in self.names else None for x in ("turned", "turned_values"))

    def tiling(self, asked: Asked) -> Any:
        q, _, v, *_ = asked.tensors
        return make_tiling(q, v, asked.n_docs, self.gate == "g", self.turned is not None)

    def plan(self, tiling: Any, asked: Asked, dq_first: bool) -> DiagonalPlan:
        from flexsp.kernels.diagonal.diagonal_plan import DiagonalPlan

        (q, _, v, *_), initial = asked.tensors, asked.initial is not None
        angles, of_values = (
            0 if x is None else asked.tensors[self.names.index(x)].shape[-1] for x in (self.turned, self.turned_values)
        )
        return DiagonalPlan(
            tiling, q.dtype, self.gate, asked.scale, initial, asked.want_final, dq_first, self.description, v.dtype,
            q.shape[2], neighbours(asked.group), self.strict, "w" in self.names, "i" in self.names,
            self.turned, angles, self.turned_values, of_values,
        )  # fmt: skip


def _split(names: str) -> list[str]:
    return names.split(",") if names else []


_TURNED_COLUMNS = 128  # of a state whose turns have gradients: walks with more spill registers
register(Diagonal, [3, 4, 5, 6, 7, 8])


class Ssd(Engine):
    """Calls of the state-space dual: q, k (a row a group of heads), v, "dt" [B, T, H], "A" [H] and, where they are
    there, "dt_bias" and "D" [H]. The form is "words|limits|description": which of those two there are, "softplus", the
    limits of steps or nothing, and what ranks compare of the call."""

    kind, title = "ssd", NAME
    params = frozenset(("A", "dt_bias", "D"))

    def __init__(self, form: str) -> None:
        self.form = form
        words, limits, self.description = form.split("|", 2)
        self.words = words.split(",")
        least, _, most = limits.partition(":")
        self.limits = (float(least), float(most)) if limits else None
        self.names = ("q", "k", "v", "dt", "A", *(x for x in ("dt_bias", "D") if x in self.words))

    def tiling(self, asked: Asked) -> Any:
        q, _, v, *_ = asked.tensors
        return make_tiling(q, v, asked.n_docs, gated=True)

    def plan(self, tiling: Any, asked: Asked, dq_first: bool) -> DiagonalPlan:
        from flexsp.kernels.diagonal.ssd_plan import SsdPlan

        (q, _, v, dt, *_), initial = asked.tensors, asked.initial is not None
        softplus, bias, skips = (x in self.words for x in ("softplus", "dt_bias", "D"))
        return SsdPlan(
            tiling, q.dtype, "dt", asked.scale, initial, asked.want_final, dq_first, self.description, v.dtype,
            q.shape[2], neighbours(asked.group),
            softplus=softplus, bias=bias, skips=skips, limits=self.limits, dt_dtype=dt.dtype,
        )  # fmt: skip


register(Ssd, [5, 6, 7])


class _InPytorch:
    """The same calls where no kernels run them."""

    def run(self, how: str, asked: Asked) -> tuple[torch.Tensor, torch.Tensor | None]:
        names, rows, strict, description = how.split("|", 3)
        given = dict(zip(("q", "k", "v", *_split(names)), asked.tensors, strict=True))
        q, k, v, g, g_gamma, w, i = (given.get(x) for x in ("q", "k", "v", "g", "g_gamma", "w", "i"))
        assert q is not None and k is not None and v is not None
        return in_pytorch.run(
            q, k, v, g, g_gamma, asked.scale, asked.initial, asked.cu_seqlens, asked.group, description,
            asked.want_final, int(rows), w, i, bool(strict), given.get("turned"), given.get("turned_values"),
        )  # fmt: skip

    def like(self, how: str, asked: Asked) -> Like:
        q, _, v, *_ = asked.tensors
        (B, T, H, K), V = q.shape, v.shape[-1]
        states = asked.n_docs or B, H, K, V
        return Like((B, T, H, V), v.dtype, states, torch.promote_types(q.dtype, torch.float32))


functions.define(Diagonal.kind, _InPytorch())


def diagonal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    w: torch.Tensor | None = None,
    i: torch.Tensor | None = None,
    turned: torch.Tensor | None = None,
    turned_values: torch.Tensor | None = None,
    *,
    scale: float,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    sp: SequenceParallel | None = None,
    op: str = "linear attention",
    rows: int = 1,
    strict: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """S_t = e^{g_t} S_{t-1} + e^{i_t} k_t v_t^T, o_t = scale q_t S_t + w_t v_t, over [B, T, H, *] inputs already
    validated.

    i [B, T, H], log write gates, is in float32, or in float64 beside float64: natural logarithms of about 0 at most,
    since what decayed below e^-104 is left out whatever it was multiplied by. -inf writes nothing. ValueError where
    there is neither g nor g_gamma.

    w [B, T, H] is in float32, or in float64 beside float64. It needs a row of keys for every head, and values of more
    than one channel: ValueError where these are not there.

    turned: by how many turns (of 2 pi) each token rotates the first S pairs of the state's rows, channels 2 p and
    2 p + 1 of q and k, [B, T, G, S] in float32, or in float64 beside float64, with a row for each head of q. The
    caller has rotated q and k by the sums of these, without autograd: turned is given for its gradient alone, which is
    taken of states, so that it is exact over long texts. It is that of turning all that lies before a token, initial
    states included, against that token and all that lies behind it; final states are behind all tokens.

    turned_values: the same of the state's columns and of v, [B, T, H, S]. Outputs and final states are rotated as v is;
    the caller rotates them back, again without autograd. ValueError where v has fewer than S pairs of channels.

    v may be in float32 beside q and k in bfloat16, and then o is too; states of one column are summed up in float32.
    ``op`` is the name by which ranks tell each other which call they are in. A token of `sp.set_lengths` is ``rows``
    of T; ``cu_seqlens`` count those too.

    strict: tokens do not read what they write themselves, o_t = scale q_t (S_t - e^{i_t} k_t v_t^T) + w_t v_t. It would
    be rounded with all else that they read, and so would its gradients. Callers can add it exactly, by `w`.
    """
    if w is not None and (q.shape[2] != v.shape[2] or v.shape[-1] == 1):
        expected = f"queries of {v.shape[2]} heads and values of more than one channel"
        raise ValueError(f"w: expected {expected}; got {q.shape[2]} heads and {v.shape[-1]} channels")
    if i is not None and g is None and g_gamma is None:
        raise ValueError("i: expected write gates beside g or g_gamma; got neither of these")
    in_kernels = asks_for_kernels(q.is_cuda, q.dtype)
    if turned_values is not None and 2 * turned_values.shape[-1] > v.shape[-1]:
        expected = f"angles of at most {v.shape[-1] // 2} pairs of v's {v.shape[-1]} channels"
        raise ValueError(f"turned_values: expected {expected}; got {turned_values.shape[-1]}")
    if turned is not None and in_kernels and v.shape[-1] == 1:  # a second column, since walks leave its gradient
        start = None if initial_state is None else F.pad(initial_state, (0, 1))
        o, final = diagonal(
            q, k, F.pad(v, (0, 1)), g, g_gamma, w, i, turned, scale=scale, initial_state=start,
            output_final_state=output_final_state, cu_seqlens=cu_seqlens, sp=sp, op=op, rows=rows, strict=strict,
        )  # fmt: skip
        return o[..., :1], None if final is None else final[..., :1]
    form, tensors = _described(
        q, k, v, g, g_gamma, w, i, scale, cu_seqlens is not None, op, rows, turned, strict, turned_values
    )  # fmt: skip
    if in_kernels:
        blocks = ColumnBlocks.of(v.shape[-1]) if turned is None else ColumnBlocks.of(v.shape[-1], _TURNED_COLUMNS)
        if turned_values is not None:
            tensors[-1] = _pairs_in_blocks(blocks, turned_values)
        given = _in_blocks(blocks, tensors, turned is not None, turned_values is not None)
        o, final = Diagonal.run(
            form, given, blocks.states(initial_state), cu_seqlens, output_final_state=output_final_state, sp=sp,
            scale=scale,
        )  # fmt: skip
        return blocks.outputs(o), blocks.joined(final)
    return functions.run(
        Diagonal.kind, form, tensors, initial_state, cu_seqlens, output_final_state=output_final_state, sp=sp,
        scale=scale,
    )  # fmt: skip


def _described(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, g_gamma: torch.Tensor | None,
    w: torch.Tensor | None, i: torch.Tensor | None, scale: float, packed: bool, op: str, rows: int,
    turned: torch.Tensor | None = None, strict: bool = False, turned_values: torch.Tensor | None = None,
) -> tuple[str, list[torch.Tensor]]:  # fmt: skip
    """The form and the tensors of a call of `diagonal`."""
    gates = [name for name, x in (("g", g), ("g_gamma", g_gamma)) if x is not None]
    call = f"{op} on {q.dtype}, {' and '.join(gates) or 'no gate'}"
    call += f"{'' if i is None else ', write gates'}{'' if w is None else ', skip weights'}"
    call += f"{'' if turned is None else ', turned'}{'' if turned_values is None else ', turned values'}"
    call += ", own products apart" if strict else ""
    call += ", packed" if packed else ""
    if type(scale) is float:  # else symbolic
        call += f", scale {scale}"
    gate = g if g is not None else None if g_gamma is None else g_gamma.contiguous()
    others = {name: x for name, x in (("i", i), ("w", w)) if x is not None}
    of_turns = ("turned", turned), ("turned_values", turned_values)
    last = {name: x for name, x in of_turns if x is not None}
    tensors = [q, k, v, *([] if gate is None else [gate]), *others.values(), *last.values()]
    return f"{','.join([*gates[:1], *others, *last])}|{rows}|{'strict' if strict else ''}|{call}", tensors


def _in_blocks(
    blocks: ColumnBlocks, tensors: list[torch.Tensor], turned: bool = False, of_values: bool = False
) -> list[torch.Tensor]:
    """q, k, v and what heads have besides, where blocks of columns are heads. turned, of_values: at the end there is a
    tensor of keys, and one that is in blocks."""
    end = len(tensors) - turned - of_values
    by_head = [blocks.repeated(x, x.dim() - 1) for x in tensors[3:end]]
    return [*tensors[:2], blocks.values(tensors[2]), *by_head, *tensors[end:]]


def _pairs_in_blocks(blocks: ColumnBlocks, x: torch.Tensor) -> torch.Tensor:
    """[B, T, H n, width / 2] of x [B, T, H, S], a number for each of the first S pairs of columns. Blocks of which
    there are several have even widths."""
    if blocks.n == 1:
        return x
    more = blocks.n * blocks.width // 2 - x.shape[-1]
    return F.pad(x, (0, more)).unflatten(-1, (blocks.n, blocks.width // 2)).flatten(2, 3)


Pair = tuple[torch.Tensor | None, torch.Tensor | None]


def diagonal_pair(
    q: torch.Tensor, k: torch.Tensor, values: tuple[torch.Tensor, torch.Tensor], g: torch.Tensor | None = None,
    i: torch.Tensor | None = None, *, scale: float, initial_states: Pair, output_final_state: bool,
    cu_seqlens: torch.Tensor | None, sp: SequenceParallel | None, ops: tuple[str, str],
) -> tuple[tuple[torch.Tensor, torch.Tensor], Pair]:  # fmt: skip
    """`diagonal` for the first values with write gates i, and for the second ones without: (outputs, final states).

    Ranks exchange the states of both together, but in graphs and traces of kernels, where each is an operator. Outputs
    may have a wider dtype than the values.
    """
    (v, u), (start, start2), packed = values, initial_states, cu_seqlens is not None
    how: dict[str, Any] = {
        "scale": scale, "output_final_state": output_final_state, "cu_seqlens": cu_seqlens, "sp": sp,
    }  # fmt: skip
    if not asks_for_kernels(q.is_cuda, q.dtype):  # columns of a state do not act on each other
        wide, columns = torch.promote_types(q.dtype, torch.float32), [v.shape[-1], u.shape[-1]]
        weighted = v.to(wide) if i is None else v.to(wide) * i.to(wide).exp().unsqueeze(-1)
        initial = None if start is None or start2 is None else torch.cat([start, start2], -1)
        both = torch.cat([weighted, u.to(wide)], -1)
        found, final = diagonal(q, k, both, g, initial_state=initial, op=f"{ops[0]} and {ops[1]}", **how)
        (o, o2), parts = found.split(columns, -1), (None, None) if final is None else final.split(columns, -1)
        return (o, o2), (parts[0], parts[1])
    in_segments = sp is not None and sp.segment > 0  # one after the other
    if in_segments or not plain(q, k, v, u, g, i, start, start2, cu_seqlens):
        o, final = diagonal(q, k, v, g, i=i, initial_state=start, op=ops[0], **how)
        o2, final2 = diagonal(q, k, u, g, initial_state=start2, op=ops[1], **how)
        return (o, o2), (final, final2)
    blocks = ColumnBlocks.of(v.shape[-1])
    form, tensors = _described(q, k, v, g, None, None, i, scale, packed, ops[0], 1)
    form2, tensors2 = _described(q, k, u, g, None, None, None, scale, packed, ops[1], 1)
    o, final, o2, final2 = Diagonal.run_both(
        (form, _in_blocks(blocks, tensors), blocks.states(start)), (form2, tensors2, start2), cu_seqlens,
        output_final_state=output_final_state, sp=sp, scale=scale,
    )  # fmt: skip
    return (blocks.outputs(o), o2), (blocks.joined(final), final2)


def ssd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor | None,
    D: torch.Tensor | None,
    *,
    softplus: bool,
    limits: tuple[float, float] | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    cu_seqlens: torch.Tensor | None,
    sp: SequenceParallel | None,
    op: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """S_t = e^{s_t A} S_{t-1} + s_t k_t v_t^T, o_t = q_t S_t + D v_t with s_t = dt_t + dt_bias or softplus of that,
    within the limits, in kernels (`asks_for_kernels`), over inputs already validated: q, k [B, T, G, K], v [B, T, H,
    V], dt [B, T, H], others [H]."""
    # torch.compile warns of functions that keep results.
    text_of = _form_of_ssd.__wrapped__ if torch.compiler.is_compiling() else _form_of_ssd
    form = text_of(op, q.dtype, softplus, dt_bias is not None, D is not None, limits, cu_seqlens is not None)
    params = [x.contiguous() for x in (A, dt_bias, D) if x is not None]
    blocks = ColumnBlocks.of(v.shape[-1])
    tensors = [q, k, blocks.values(v), blocks.repeated(dt), *(blocks.repeated(x, 0) for x in params)]
    o, final = Ssd.run(
        form, tensors, blocks.states(initial_state), cu_seqlens, output_final_state=output_final_state, sp=sp
    )  # fmt: skip
    return blocks.outputs(o), blocks.joined(final)


@functools.lru_cache(maxsize=256)
def _form_of_ssd(
    op: str, dtype: torch.dtype, softplus: bool, bias: bool, skips: bool, limits: tuple[float, float] | None,
    packed: bool,
) -> str:  # fmt: skip
    there = [("softplus", softplus), ("dt_bias", bias), ("D", skips)]
    words = [word for word, used in there if used]
    within = "" if limits is None else "{}:{}".format(*limits)
    steps = " and ".join([f"dt in {within}" if within else "dt", *words])
    return f"{','.join(words)}|{within}|{op} on {dtype}, {steps}{', packed' if packed else ''}"
