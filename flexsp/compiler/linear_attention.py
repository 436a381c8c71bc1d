"""The object that a user makes of three functions."""

from __future__ import annotations

import functools as ft
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from flexsp.comm.group import SequenceParallel, resolve_sp, sp_over
from flexsp.compiler import functions
from flexsp.compiler.check import Program, check
from flexsp.compiler.meta import CHUNK_STATE, STATE, ConstExpr, InputMeta, Size
from flexsp.compiler.trace import trace
from flexsp.compiler.values import NotEmittable
from flexsp.scan.kept import keep

if TYPE_CHECKING:
    from flexsp.compiler.dispatch import Recipe
    from flexsp.compiler.engine import Generated

__all__ = ["LinearAttention"]

_CHUNK = 64
_CALLS = 256  # signatures that are kept
_MAKING = threading.RLock()  # tracers and forward-mode differentiation have one state for all threads
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_KINDS = {
    "none": "the state is kept: ranks add up",
    "scalar": "one factor for the state: ranks exchange the state and multiply",
    "vector": "one factor a row of the state: ranks exchange the state and multiply",
    "elementwise": "a factor for each number of the state: ranks exchange the state and multiply",
    "dense": "a matrix from the left: each rank propagates [0 | I] too, and ranks exchange the state",
    "not affine": "not affine in the state: ranks run one after the other, exactly",
}


class LinearAttention:
    """A linear-attention variant from three PyTorch functions, each on one chunk of one head.

    ``chunk_mode(k, v, ...)`` gives what a chunk adds to the state, from its own tokens. ``decay_mode(prev_s,
    chunk_state, ...)`` gives the state after the chunk. ``merge_mode(q, ..., chunk_state, ...)`` gives the chunk's
    outputs [C, V]; its ``chunk_state`` is the state that enters the chunk. Arguments are inputs of ``input_meta`` or
    names given to `cache_result` in chunk_mode. On one chunk inputs are [C, ...], parameters lose their heads, states
    are [K, V] or [K].
    The notation is that of Forge (Listings 1 and 3).

    The functions run in PyTorch, on any device, in float32 or in the inputs' dtype if that is wider, whatever autocast
    says; casts of floating tensors in them are dropped. On GPUs run kernels that are generated from them at the first
    call; `explain` names the file.

    Args:
        input_meta: name -> SymbTensor, or a number that the functions get as it is. Tensors whose first size is "T"
            are tokens [T, H, ...]; others are parameters [H, ...]. "prev_s" [NS, H, K, V] (or [NS, H, K]) is the state;
            "chunk_state" may repeat its shape.
        chunk_mode, decay_mode, merge_mode: the functions. Arguments with defaults that are no inputs keep them.
        sp_group: SequenceParallel over whose ranks calls run that give no ``sp``; or a ProcessGroup over whose ranks
            `flexsp.init_sequence_parallel` was called.
        enable_aot: compile the kernels now, for all combinations of the ConstExprs and the dtypes of ``input_meta``,
            into Triton's cache (TRITON_CACHE_DIR): for the GPU that is there, else for compute capability
            FLEXSP_AOT_ARCH (90). Later calls, of other processes too, find them there. Inputs of other dtypes, with
            other strides, and calls with ``prev_s`` compile at their first call.
        code_dir: folder of the generated kernels' file; FLEXSP_CODE_DIR or a folder in the user's cache if None.
        chunk_size: tokens of a chunk, None lets the plan choose; results do not depend on it beyond rounding, unless
            the functions do.
        autotune: on GPUs, time plans (chunk size, segments, tiles, warps, stages) at the first call of each signature
            and take the quickest; seconds to minutes, most of them compilation. `explain` then says how far the plan
            that would have been taken was from it.

    Raises:
        CompileError: a function cannot be traced, is not causal, or has wrong shapes; names function, line and remedy.
        ValueError: bad input_meta.
        NotAvailable: enable_aot where no kernels can be generated.
    """

    def __init__(
        self,
        input_meta: Mapping[str, Any],
        chunk_mode: Callable[..., torch.Tensor],
        decay_mode: Callable[..., torch.Tensor],
        merge_mode: Callable[..., torch.Tensor],
        sp_group: SequenceParallel | None = None,
        enable_aot: bool = False,
        code_dir: str | None = None,
        chunk_size: int | None = None,
        autotune: bool = False,
    ) -> None:
        if chunk_size is not None and (type(chunk_size) is not int or chunk_size < 1):
            raise ValueError(f"chunk_size: expected a positive integer, got {chunk_size!r}")
        meta = InputMeta.of(input_meta)
        self._sizes = meta.sizes()
        self._sp, self._C, self._code_dir = _ranks(sp_group), chunk_size, code_dir
        self._told: set[str] = set()
        self._autotune = autotune
        self._tuned: list[str] = []
        self._calls: dict[Any, _Call] = {}
        self.program: Program = _program(meta, chunk_mode, decay_mode, merge_mode)
        if enable_aot:
            self._compile_ahead()

    def __call__(
        self,
        *,
        prev_s: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        sp: SequenceParallel | bool | None = None,
        **inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Outputs and final states.

        Args:
            inputs: the tensors of ``input_meta`` by name, [T, H, ...] or [B, T, H, ...]; parameters [H, ...].
            prev_s: initial states [N, H, *state], N = B or the number of documents, in float32, or float64 if an input
                is; zeros if None. Under ``sp`` without ``cu_seqlens`` only the first rank has them.
            cu_seqlens: int32 or int64 [N+1], global boundaries of packed documents; B must be 1. Where kernels run its
                values are not looked at unless FLEXSP_CHECK=1.
            sp: as for the ops: None takes the ambient group or ``sp_group``, False runs on this rank alone.

        Returns:
            o [T, H, V] or [B, T, H, V] in the dtype of the first tensor of ``input_meta``, and the final states
            [N, H, *state]; under ``sp`` without ``cu_seqlens`` None on all ranks but the last.
        """
        if torch.compiler.is_compiling():
            return self._uncompiled(inputs, prev_s, cu_seqlens, sp)
        return self._call(inputs, prev_s, cu_seqlens, sp)

    @torch.compiler.disable
    def _uncompiled(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._call(*given)

    def _call(
        self, inputs: dict[str, torch.Tensor], prev_s: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
        sp: SequenceParallel | bool | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        group = resolve_sp(self._sp if sp is None and self._sp is not None else sp)
        signature = _signature(inputs, prev_s, cu_seqlens, group)
        call = self.remembered(signature)
        if call is None:
            call = self._checked(inputs, prev_s, cu_seqlens, group)
            keep(self._calls, signature, call, _CALLS)
        shard, bounds = (0, call.T, call.T), None
        if cu_seqlens is not None:
            shard = shard if group is None else group.shard_range(call.T)
            bounds = _bounds(cu_seqlens, shard[2], look=call.recipe is None)
        recipe = call.recipe
        if recipe is not None:
            if self._autotune and recipe.device.type == "cuda" and not call.tuned:
                recipe = self._tune(recipe, inputs, prev_s, cu_seqlens, group, shard)
                self._calls[signature] = replace(call, recipe=recipe, tuned=True)
            return self._run(recipe, [inputs[name] for name in recipe.names], prev_s, cu_seqlens, shard)
        return self._in_pytorch(call, inputs, prev_s, bounds, group)

    def _tune(
        self, recipe: Recipe, inputs: dict[str, torch.Tensor], prev_s: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None, group: SequenceParallel | None, shard: tuple[int, int, int],
    ) -> Recipe:  # fmt: skip
        """The recipe with the quickest plan. Ranks search each for itself: what they exchange does not depend on it."""
        from flexsp.compiler.tune import tune
        from flexsp.kernels.table import chunk_table

        make, code, names = type(recipe), recipe.code, recipe.names
        given = {name: inputs[name].detach() for name in names}

        def table(chunk: int) -> torch.Tensor | None:
            last = group is None or group.is_last
            return None if cu_seqlens is None else chunk_table(cu_seqlens, *shard[:2], chunk, last)

        backward = torch.is_grad_enabled() and any(inputs[name].requires_grad for name in names)
        found = tune(
            lambda plan: make(code, given, prev_s, cu_seqlens, None, plan), list(given.values()), prev_s, table,
            backward,
        )  # fmt: skip
        what = "forward and backward" if backward else "forward"
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items())
        self._tuned = [*self._tuned[1 - _CALLS :], f"autotune of {what} for {shapes}: {found}"]
        return make(code, given, prev_s, cu_seqlens, group, found.plan)

    def __getstate__(self) -> dict[str, Any]:
        """Other processes make their kernels anew."""
        return {name: x for name, x in self.__dict__.items() if name != "_generated"} | {"_calls": {}}

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearAttention:
        """Copies of a module run the same kernels."""
        return self

    def remembered(self, signature: tuple[Any, ...]) -> _Call | None:
        """What an earlier call of the signature was found to be."""
        return self._calls.get(signature)

    def _in_pytorch(
        self, call: _Call, inputs: dict[str, torch.Tensor], prev_s: torch.Tensor | None, bounds: list[int] | None,
        group: SequenceParallel | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        meta = self.program.meta
        tokens, params, batched = self._sorted(inputs)
        first = next(iter(tokens.values()))
        tokens, params = ({name: x.to(call.wide) for name, x in each.items()} for each in (tokens, params))
        initial = prev_s
        if initial is None:
            initial = torch.zeros(call.states, device=first.device, dtype=call.wide)
        with _no_autocast(first.device.type):
            o, final = functions.run(
                self.program, tokens, params, meta.numbers, initial,
                given=prev_s is not None, bounds=bounds, C=self._C or _CHUNK, sp=group,
            )  # fmt: skip
        o = o.to(first.dtype)
        return (o if batched else o[0]), final

    def _checked(
        self, inputs: dict[str, torch.Tensor], prev_s: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
        group: SequenceParallel | None,
    ) -> _Call:  # fmt: skip
        """What a call with such tensors is; ValueError where it is wrong."""
        meta = self.program.meta
        tokens, params, _ = self._sorted(inputs)
        first = next(iter(tokens.values()))
        wide = torch.float32
        for x in (*tokens.values(), *params.values()):
            wide = torch.promote_types(wide, x.dtype)
        names = self._known(tokens, params)
        if group is not None and group.device.type != first.device.type:
            raise ValueError(f"sp: expected a group on the inputs' {first.device.type}, got one on {group.device}")
        B, T, H = first.shape[:3]
        N = B
        if cu_seqlens is not None:
            _check_boundaries(cu_seqlens, B, first.device)
            N = cu_seqlens.numel() - 1
        states = (N, H, *(self._size(s, names, prev_s) for s in meta.state_sizes))
        _check_initial(prev_s, states, first.device, wide, cu_seqlens is not None, group)
        code = self._kernels(first, wide, names, group, (*inputs.values(), prev_s))
        recipe = None
        if code is not None:
            from flexsp.compiler import dispatch

            self._run = dispatch.run
            given = {name: inputs[name] for name in (*meta.tokens, *meta.params)}
            recipe = dispatch.Recipe(code, given, prev_s, cu_seqlens, group)
        return _Call(T, states, wide, recipe)

    def _compile_ahead(self) -> None:
        if isinstance(self._generated, str):
            raise NotEmittable(f"enable_aot: there are no kernels to compile: {self._generated}")
        from triton.backends.compiler import GPUTarget

        from flexsp.compiler.ahead import compile_ahead
        from flexsp.scan.launch import current_target

        arch = int(os.environ.get("FLEXSP_AOT_ARCH", 90))
        target = current_target() if torch.cuda.is_available() else GPUTarget("cuda", arch, 32)
        compile_ahead(self._generated, self.program.meta, target)

    @ft.cached_property
    def _generated(self) -> Generated | str:
        """The kernels made of the functions, or why there are none."""
        try:
            from flexsp.compiler.engine import generated
        except ImportError as error:
            return f"Triton is not there ({error})"
        try:
            with _MAKING, _no_autocast("cpu"), _no_autocast("cuda"):
                return generated(self._for_kernels(), self._code_dir, self._C)
        except NotEmittable as error:
            return str(error)

    def _for_kernels(self) -> Program:
        """The program that kernels are made of; NotEmittable where there are none for it."""
        return self.program

    def _kernels(
        self, first: torch.Tensor, wide: torch.dtype, names: dict[str, int], group: SequenceParallel | None,
        given: tuple[torch.Tensor | None, ...],
    ) -> Generated | None:  # fmt: skip
        """The kernels for this call, None where the functions run in PyTorch."""
        if wide == torch.float64 or not (first.is_cuda or os.environ.get("FLEXSP_BACKEND") == "triton"):
            return None
        code = self._generated
        ranks = group is not None and group.world_size > 1
        reason = code if isinstance(code, str) else code.refuses(names, first.dtype, first.is_cuda, ranks)
        if _forward_mode() or any(x is not None and _aligned(x) is None for x in given):
            reason = "kernels have no derivatives in forward mode and no transforms of torch.func"
        if reason is None:
            assert not isinstance(code, str)
            return code
        if reason not in self._told:
            self._told.add(reason)
            warnings.warn(f"{self.program.merge.name}: runs in PyTorch, slowly: {reason}", stacklevel=3)
        return None

    @property
    def kernels(self) -> Generated:
        """The generated kernels; NotAvailable where there are none."""
        if isinstance(self._generated, str):
            raise NotEmittable(f"{self.program.merge.name}: no generated kernels: {self._generated}")
        return self._generated

    def explain(self, T: int = 16384, B: int = 1) -> str:
        """What was made of the functions: kind of transition, where it runs, the kernels and their file, the graphs.

        And the plan of a call of T tokens, for the largest of the sizes that ``input_meta`` allows (32 heads where it
        names no number) and the dtype of its first tensor: schedule, chunks, tiles; bytes and microseconds that each
        launch is predicted to take on an H200.
        """
        for name, n in (("T", T), ("B", B)):
            if type(n) is not int or n < 0:
                raise ValueError(f"{name}: expected a number of {'tokens' if name == 'T' else 'sequences'}, got {n!r}")
        program = self.program
        lines = [f"transition: {program.transition} ({_KINDS[program.transition]})"]
        code = self._generated
        if isinstance(code, str):
            lines.append(f"runs: the functions in PyTorch, chunks of {self._C or _CHUNK}; no generated kernels: {code}")
        else:
            lines.append("runs: generated kernels on GPUs; on CPU and in float64 the functions, in PyTorch")
            lines += code.explain()
            lines += [*self._plan(code, T, B), *self._tuned]
        for role, traced in (("chunk", program.chunk), ("decay", program.decay), ("merge", program.merge)):
            lines.append(f"\n{role}: {traced.name}({', '.join(traced.arguments)})")
            lines += [f"    {node.format_node()}" for node in traced.graph.nodes]
        return "\n".join(lines)

    def _plan(self, code: Generated, T: int, B: int) -> list[str]:
        from flexsp.compiler.explain import describe

        first = next(iter(self.program.meta.tokens.values()))
        heads = first.shape[1]
        sizes = {name: max(choices) for name, choices in self._sizes.items()}
        H = heads if isinstance(heads, int) else sizes.get(heads.name if isinstance(heads, ConstExpr) else heads, 32)
        try:
            return describe(code, {name: sizes[name] for name in code.layout.sizes}, B * H, T, first.dtype)
        except (NotEmittable, ValueError) as error:
            return [f"no plan: {error}"]

    def _sorted(self, inputs: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], bool]:
        meta = self.program.meta
        expected = {*meta.tokens, *meta.params}
        if inputs.keys() != expected:
            missing, unknown = sorted(expected - inputs.keys()), sorted(inputs.keys() - expected)
            raise ValueError(f"inputs: expected {sorted(expected)}; missing {missing}, unknown {unknown}")
        for name, x in inputs.items():
            if not isinstance(x, torch.Tensor) or x.dtype not in _FLOATS or x.layout != torch.strided:
                got = f"{x.dtype} ({x.layout})" if isinstance(x, torch.Tensor) else type(x).__name__
                raise ValueError(f"{name}: expected a floating tensor of 16, 32 or 64 bits, got {got}")
        leading = next(iter(meta.tokens))
        extra = inputs[leading].dim() - len(meta.tokens[leading].shape)
        if extra not in (0, 1):
            raise ValueError(f"{leading}: expected [T, H, ...] or [B, T, H, ...], got {tuple(inputs[leading].shape)}")
        tokens = {name: inputs[name] if extra else inputs[name].unsqueeze(0) for name in meta.tokens}
        return tokens, {name: inputs[name] for name in meta.params}, bool(extra)

    def _known(self, tokens: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> dict[str, int]:
        """Sizes by name; ValueError where two inputs disagree or a size is not among its choices."""
        meta = self.program.meta
        found: dict[str, int] = {}
        lead = next(iter(tokens.values()))
        for name, x in (tokens | params).items():
            sizes: list[Size] = ["B", *meta.tokens[name].shape] if name in tokens else list(meta.params[name].shape)
            if x.dim() != len(sizes) or x.device != lead.device:
                raise ValueError(
                    f"{name}: expected {len(sizes)} dimensions on {lead.device}, got {tuple(x.shape)} on {x.device}"
                )
            keys = [size.name if isinstance(size, ConstExpr) else size for size in sizes]
            for key, n in zip(keys, x.shape, strict=True):
                allowed = (key,) if isinstance(key, int) else (found[key],) if key in found else self._sizes.get(key)
                if allowed is not None and n not in allowed:
                    want = " or ".join(map(str, allowed))
                    got = f"{n} in [{', '.join(map(str, keys))}] = {list(x.shape)}"
                    raise ValueError(f"{name}: expected size {key} = {want}, got {got}")
                if not isinstance(key, int):
                    found[key] = n
        return found

    def _size(self, size: Size, names: dict[str, int], prev_s: torch.Tensor | None) -> int:
        """A size of the state; one that no input has is its only choice, or what the given state has."""
        if not isinstance(size, ConstExpr):
            return int(size)
        choices, at = self._sizes[size.name], self.program.meta.state_sizes.index(size) + 2
        if size.name in names or len(choices) == 1:
            return names.get(size.name, choices[0])
        if prev_s is None or prev_s.dim() <= at or prev_s.shape[at] not in choices:
            raise ValueError(f"{STATE}: expected, since no input tells {size.name} of {list(choices)}")
        return prev_s.shape[at]


def _program(meta: InputMeta, *modes: Callable[..., torch.Tensor]) -> Program:
    """The functions traced and checked."""
    inputs = {*meta.tokens, *meta.params, *meta.numbers}
    with _MAKING:
        chunk = trace(modes[0], "chunk_mode", inputs, meta.numbers)
        after_chunk = {*inputs, CHUNK_STATE, *chunk.cached}
        decay = trace(modes[1], "decay_mode", {*after_chunk, STATE}, meta.numbers)
        return check(meta, chunk, decay, trace(modes[2], "merge_mode", after_chunk, meta.numbers))


@dataclass(frozen=True)
class _Call:
    """What all calls of one signature share: tokens of this rank, shape and dtype of states, the kernels' recipe."""

    T: int
    states: tuple[int, ...]
    wide: torch.dtype
    recipe: Recipe | None
    tuned: bool = False


def _signature(
    inputs: dict[str, Any], prev_s: Any, cu_seqlens: Any, sp: SequenceParallel | None
) -> tuple[Any, ...]:
    """What decides how a call runs; what is no tensor is told apart by its type, to be refused."""
    facts: list[Any] = [*inputs]
    for x in (*inputs.values(), prev_s, cu_seqlens):
        if isinstance(x, torch.Tensor):
            facts.append((x.shape, x.stride(), x.dtype, x.device, _aligned(x)))
        else:
            facts.append(type(x))
    facts += [None if sp is None else sp.id, _forward_mode()]
    if not getattr(next(iter(inputs.values()), None), "is_cuda", False):
        facts.append(os.environ.get("FLEXSP_BACKEND"))
    return tuple(facts)


def _forward_mode() -> bool:
    """Whether tensors may carry tangents, which kernels would lose."""
    return forward_ad._current_level >= 0


def _aligned(x: torch.Tensor) -> bool | None:
    """Whether vectors of 16 bytes can be loaded; None for what torch.func transforms, which has no address."""
    try:
        return x.data_ptr() % 16 == 0
    except RuntimeError:
        return None


def _ranks(sp_group: Any) -> SequenceParallel | None:
    if sp_group is None or isinstance(sp_group, SequenceParallel):
        return sp_group
    if not isinstance(sp_group, torch.distributed.ProcessGroup):
        raise ValueError(
            "sp_group: expected a ProcessGroup or what flexsp.init_sequence_parallel(group) returns, got "
            f"{type(sp_group).__name__}"
        )
    found = sp_over(sp_group)
    if found is None:
        ranks = torch.distributed.get_process_group_ranks(sp_group)
        raise ValueError(f"sp_group: call flexsp.init_sequence_parallel(group) first; none is open over ranks {ranks}")
    return found


def _check_initial(
    prev_s: torch.Tensor | None, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, packed: bool,
    sp: SequenceParallel | None,
) -> None:  # fmt: skip
    if prev_s is None:
        return
    if not isinstance(prev_s, torch.Tensor):
        raise ValueError(f"{STATE}: expected a tensor {shape} or None, got {type(prev_s).__name__}")
    if tuple(prev_s.shape) != shape or prev_s.device != device or prev_s.dtype != dtype:
        got = f"{tuple(prev_s.shape)} of {prev_s.dtype} on {prev_s.device}"
        raise ValueError(f"{STATE}: expected {shape} of {dtype} on {device}, got {got}")
    if sp is not None and not packed and not sp.is_first:
        raise ValueError(f"{STATE}: expected on the first rank only, got one on rank {sp.rank}")


def _no_autocast(kind: str) -> AbstractContextManager[Any]:
    """States stay in the accumulation dtype."""
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _check_boundaries(cu_seqlens: torch.Tensor, B: int, device: torch.device) -> None:
    integers = (torch.int32, torch.int64)
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.dtype not in integers:
        got = getattr(cu_seqlens, "dtype", type(cu_seqlens).__name__), list(getattr(cu_seqlens, "shape", ()))
        raise ValueError(f"cu_seqlens: expected a tensor [N + 1] of int32 or int64, got {got[0]} {got[1]}")
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens: expected a tensor on {device}, got one on {cu_seqlens.device}")
    if B != 1:
        raise ValueError(f"cu_seqlens: expected batch size 1, got {B}")
    if cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens: expected boundaries of one document or more, got {cu_seqlens.tolist()}")


def _bounds(cu_seqlens: torch.Tensor, total: int, look: bool) -> list[int]:
    """The boundaries, which must end at `total`; not looked at on CUDA unless `look` or FLEXSP_CHECK=1."""
    if not look and cu_seqlens.is_cuda and os.environ.get("FLEXSP_CHECK") != "1":
        return []
    bounds = [int(n) for n in cu_seqlens.tolist()]
    if bounds[0] != 0 or bounds[-1] != total or sorted(bounds) != bounds:
        raise ValueError(f"cu_seqlens: expected non-decreasing boundaries from 0 to {total}, got {bounds}")
    return bounds
