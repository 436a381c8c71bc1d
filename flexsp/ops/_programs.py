"""How ops call a program of `flexsp.variants`, and the token loops that `recurrent_*` ops run."""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.comm.tracing import constant_in_graphs
from flexsp.compiler import LinearAttention, torch_compile
from flexsp.exceptions import asks_for_kernels
from flexsp.kernels import gates
from flexsp.kernels.vector.vector_state import Gates, vector_state
from flexsp.kernels.views import contiguous, turned
from flexsp.ops import _validate as check
from flexsp.runtime.clean_thread import run_in_clean_thread

__all__ = [
    "Call", "Sizes", "clamped", "factor_of", "final_state", "initial_state", "known", "matrix_loop", "recur_matrix",
    "recur_vector", "rows_at", "run_matrix", "run_program", "run_vector", "token_loop", "wide",
]  # fmt: skip

Tensor = torch.Tensor
Optional = torch.Tensor | None
_MOST_CHANNELS = 128  # of a head of a vector state, because a kernel holds one head's state in registers


class Call(NamedTuple):
    """The arguments that all these ops have."""

    initial_state: Optional
    output_final_state: bool
    state_v_first: bool = False
    cu_seqlens: Optional = None
    cu_seqlens_cpu: Optional = None
    sp: SequenceParallel | bool | None = False


def wide(x: Tensor, like: Optional = None) -> Tensor:
    """x in the accumulation dtype of ``like``, by default of x itself."""
    dtype = check.accumulation_dtype(x if like is None else like)
    return x if x.dtype == dtype else x.to(dtype)


def clamped(g: Tensor, like: Tensor) -> Tensor:
    """Log gates in the accumulation dtype of ``like``. Those so low that their decay is 0 become the lowest one that
    `flexsp.kernels.gates` lets pass; they have no gradient."""
    return gates.clamped(wide(g, like))


def initial_state(
    sizes: tuple[int, ...], dims: str, call: Call, group: SequenceParallel | None, x: Tensor
) -> Optional:  # fmt: skip
    """The initial states [N, *sizes] with K before V, after their checks. ``dims`` names the sizes: "H, K, V"."""
    check.check_flag("output_final_state", call.output_final_state)
    check.check_flag("state_v_first", call.state_v_first)
    if call.state_v_first:
        sizes, dims = (*sizes[:-2], sizes[-1], sizes[-2]), dims.replace("K, V", "V, K")
    N = check.number_of_states(x.shape[0], call.cu_seqlens)
    check.check_state("initial_state", call.initial_state, (N, *sizes), f"[N, {dims}]", x, call.cu_seqlens, group)
    swap = call.state_v_first and call.initial_state is not None
    return turned(call.initial_state) if swap else call.initial_state  # type: ignore[arg-type]


def final_state(state: Optional, call: Call) -> Optional:
    """The final states in the caller's layout, or None if the caller did not ask for them."""
    if state is None or not call.output_final_state:
        return None
    return contiguous(turned(state)) if call.state_v_first else state


class Sizes(NamedTuple):
    """What a program of `flexsp.variants` is made for: H heads with states [K, V].

    Attributes:
        scale: the factor on queries; None for programs without it.
        steps: keys of a token.
        heads_per_key: heads that share one query and key.
        rows_per_token: rows of keys and values for one row of queries and gates.
        norm: queries and keys are divided by their norms, which only the delta engine does.
    """

    H: int
    K: int
    V: int
    scale: float | None = None
    steps: int = 1
    heads_per_key: int = 1
    rows_per_token: int = 1
    norm: bool = False


def known(*sizes: int) -> list[int]:
    """The sizes as plain integers, where torch.compile may have symbols for them. A program is made for numbers."""
    return [operator.index(n) for n in sizes]


def factor_of(scale: float | None, K: int) -> float:
    """The factor on queries as a plain number, for the same reason as in `known`."""
    return check.check_scale(scale, K).__float__()  # float(x) would leave a symbol


@functools.lru_cache(maxsize=64)
def _program(name: str, sizes: Sizes) -> LinearAttention:
    module = importlib.import_module(f"flexsp.variants.{name}")
    H, K, V, scale, steps, shared, rows, norm = sizes
    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    if norm:
        options["lowerings"] = [importlib.import_module("flexsp.variants.delta_rule").OF_ANY_KEYS]
    made: LinearAttention = run_in_clean_thread(torch.device("cpu"), lambda: module.make(H, K, V, **options))
    made.remedy = "Tensors in float64, or on CPU, run in PyTorch."
    if steps > 1 or shared > 1:
        made.rows, made.heads_per_key = steps, {} if shared == 1 else {"q": shared, "k": shared}
        made.rows_per_token = {} if rows == 1 else {x: rows for x in ("q", "g") if x in made.names}
        made.graph_name = torch_compile.name_of(made)
    return made


@constant_in_graphs
def _made_for_graphs(name: str, *sizes: Any) -> tuple[str, tuple[str, ...]]:
    """The program's name in graphs and its inputs' names. Runs while torch.compile traces."""
    return torch_compile.kept(lambda: _program(name, Sizes(*sizes)))


def run_program(
    name: str, sizes: Sizes, inputs: dict[str, Tensor], initial: Optional, cu_seqlens: Optional,
    group: SequenceParallel | None,
) -> tuple[Tensor, Optional]:  # fmt: skip
    """Runs the program flexsp.variants.NAME, made for ``sizes``: its outputs and final states."""
    if torch.compiler.is_compiling():
        made, names = _made_for_graphs(name, *sizes)
        return torch_compile.call(made, [inputs[x] for x in names], initial, cu_seqlens, group)
    program = _program(name, sizes)
    return program(prev_s=initial, cu_seqlens=cu_seqlens, sp=False if group is None else group, **inputs)


def run_matrix(
    name: str, sizes: tuple[int, ...], inputs: dict[str, Tensor], scale: float | None, call: Call, first: str = "q", *,
    heads_per_key: int = 1, norm: bool = False,
) -> tuple[Tensor, Optional]:  # fmt: skip
    """Runs an op with matrix states: the checks that all of them have, then the op's program.

    Args:
        sizes: B, T, H, K and V.
        inputs: the program's tensors by name, among them q.
        first: the op's own name for q, for messages.
        heads_per_key, norm: as in `Sizes`.
    """
    (H, K, V), x = known(*sizes[2:]), inputs["q"]
    group = check.resolve(call.sp, x)
    check.check_cu_seqlens(call.cu_seqlens, call.cu_seqlens_cpu, x, first, group)
    initial = initial_state((H, K, V), "H, K, V", call, group, x)
    factor = factor_of(scale, K)
    N = check.number_of_states(x.shape[0], call.cu_seqlens)
    check.same_call(group, name, x, H, K, V, N, call.cu_seqlens is None)
    made_for = Sizes(H, K, V, factor, heads_per_key=heads_per_key, norm=norm)
    o, final = run_program(name, made_for, inputs, initial, call.cu_seqlens, group)
    return o, final_state(final, call)


def run_vector(op: str, x: Tensor, g: Tensor, call: Call, made_of: Gates | None = None) -> tuple[Tensor, Optional]:
    """Runs an op with vector states on x and log gates g, both [B, T, D]: the checks that all of them have, then the
    kernels of vector states or, in PyTorch, a program.

    Args:
        op: the name by which ranks compare their calls.
        made_of: where kernels run, what they make inputs and log gates of; the gates of `vector_state`.
    """
    (D,) = known(x.shape[2])
    group = check.resolve(call.sp, x)
    check.check_cu_seqlens(call.cu_seqlens, call.cu_seqlens_cpu, x, "x", group)
    initial = initial_state((D,), "D", call, group, x)
    N = check.number_of_states(x.shape[0], call.cu_seqlens)
    check.same_call(group, op, x, D, N, call.cu_seqlens is None)
    if asks_for_kernels(x.is_cuda, x.dtype):
        o, final = vector_state(
            x, g, op, made_of, initial_state=initial, output_final_state=call.output_final_state,
            cu_seqlens=call.cu_seqlens, sp=group,
        )
        return o, final_state(final, call)
    g, K = clamped(g, x), next(size for size in range(min(D, _MOST_CHANNELS), 0, -1) if D % size == 0)
    heads = (D // K, K)
    inputs = {"x": x.unflatten(-1, heads), "g": g.unflatten(-1, heads)}
    prev_s = None if initial is None else initial.unflatten(-1, heads)
    o, final = run_program("vector_state", Sizes(*heads, 0), inputs, prev_s, call.cu_seqlens, group)
    return o.flatten(-2), final_state(None if final is None else final.flatten(-2), call)


def token_loop(step: Callable[[Any, int], tuple[Tensor, Any]], state: Any, T: int, none: Tensor) -> tuple[Tensor, Any]:
    """Runs ``o_t, state = step(state, t)`` for t = 0..T-1: the outputs [B, T, ...] and the last state.

    Args:
        step: computes in the accumulation dtype and without matmul, whose result autocast would round.
        state: the state before the first token, a tensor or a named tuple of tensors.
        none: what is returned for the outputs if T = 0.

    Returns:
        The last state is never ``state`` itself, also if T = 0, so that a caller may change it in place.
    """
    o, last = [], state
    for t in range(T):
        o_t, last = step(last, t)
        o.append(o_t)
    if last is state:
        last = state.clone() if isinstance(state, Tensor) else type(state)(*[part.clone() for part in state])
    return torch.stack(o, dim=1) if o else none, last


def rows_at(decay: Tensor, t: int) -> Tensor:
    """Token t's factors of a state [B, H, K, V], from decays [B, T, H] of heads or [B, T, H, K] of rows."""
    return decay[:, t, :, :, None] if decay.dim() == 4 else decay[:, t, :, None, None]


def matrix_loop(
    q: Tensor, k: Tensor, v: Tensor, decay: Optional, state: Optional, bonus: Optional = None, columns: Optional = None
) -> tuple[Tensor, Tensor]:
    """S_t = decay_t S_{t-1} + k_t v_t^T and o_t = q_t S_t, token by token. All but v are in the accumulation dtype;
    the outputs are in v's dtype.

    Args:
        decay: factors [B, T, H] of the state or [B, T, H, K] of its rows.
        columns: further factors [B, T, H, V], of the state's columns.
        bonus: [H, K]; with it o_t = q_t (S_{t-1} + diag(bonus) k_t v_t^T).
    """
    (B, T, H, K), v_t = q.shape, v.to(q.dtype)

    def step(S: Tensor, t: int) -> tuple[Tensor, Tensor]:
        written = k[:, t, :, :, None] * v_t[:, t, :, None, :]
        kept = S if decay is None else S * rows_at(decay, t)
        new = (kept if columns is None else kept * columns[:, t, :, None, :]) + written
        read = new if bonus is None else S + bonus[:, :, None] * written
        return (q[:, t, :, :, None] * read).sum(-2), new

    out, last = token_loop(step, q.new_zeros(B, H, K, v.shape[-1]) if state is None else state, T, v_t)
    return out.to(v.dtype), last


def recur_matrix(
    q: Tensor, k: Tensor, v: Tensor, g: Optional, scale: float | None, call: Call, bonus: Optional = None,
    columns: Optional = None,
) -> tuple[Tensor, Optional]:  # fmt: skip
    """`run_matrix` token by token, on this rank alone. ``g`` are clamped log gates; the rest is as in `matrix_loop`."""
    (H, K), V = q.shape[2:], v.shape[3]
    state = initial_state((H, K, V), "H, K, V", call, None, q)
    reads, decay = wide(q) * check.check_scale(scale, K), None if g is None else g.exp()
    o, last = matrix_loop(reads, wide(k, q), v, decay, state, bonus, columns)
    return o, final_state(last, call)


def recur_vector(x: Tensor, written: Tensor, g: Tensor, call: Call) -> tuple[Tensor, Optional]:
    """`run_vector` token by token, on this rank alone: h_t = e^{g_t} h_{t-1} + written_t, of clamped log gates."""
    (B, T, D), decay = x.shape, g.exp()
    state = initial_state((D,), "D", call, None, x)

    def step(h: Tensor, t: int) -> tuple[Tensor, Tensor]:
        h = h * decay[:, t] + written[:, t]
        return h, h

    o, last = token_loop(step, written.new_zeros(B, D) if state is None else state, T, written)
    return o.to(x.dtype), final_state(last, call)
