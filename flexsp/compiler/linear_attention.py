"""`LinearAttention`: the object that users make of three functions, and call."""

from __future__ import annotations

import functools as ft
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from flexsp.comm.derivatives import TRANSFORMS, transformed
from flexsp.comm.group import SequenceParallel, count_failed_call, resolve_sp
from flexsp.compiler import arguments, in_segments, torch_compile
from flexsp.compiler.arguments import aligned, boundaries, check_boundaries, check_initial, ranks_of, signature_of
from flexsp.compiler.decode import decode
from flexsp.compiler.frontend import functions
from flexsp.compiler.frontend.check import check, functions_of
from flexsp.compiler.frontend.meta import STATE, ConstExpr, InputMeta, Size
from flexsp.compiler.frontend.program import Program
from flexsp.compiler.graphs.values import NotEmittable
from flexsp.compiler.planning.lowering import Lowering, TensorSpec, in_order
from flexsp.exceptions import asks_for_kernels
from flexsp.kernels.gates import clamped
from flexsp.kernels.operators import in_memory, plain, run
from flexsp.log import tell
from flexsp.runtime.clean_thread import one_at_a_time
from flexsp.runtime.kept import keep

if TYPE_CHECKING:
    from flexsp.compiler.backend.generated_kernels import Generated
    from flexsp.kernels.executable import Executable

__all__ = ["LinearAttention"]

_CHUNK = 64
_CALLS = 256  # signatures that are kept


class LinearAttention:
    """A linear-attention variant from three PyTorch functions, each on one chunk of one head.

    The functions get inputs [C, ...], parameters without their heads, and states [K, V] or [K]. Their arguments are
    names of ``input_meta``, or names that chunk_mode gives to `cache_result`:

    - ``chunk_mode(k, v, ...)`` returns what the chunk's own tokens add to the state.
    - ``decay_mode(prev_s, chunk_state, ...)`` returns the state after the chunk.
    - ``merge_mode(q, ..., chunk_state, ...)`` returns the chunk's outputs [C, V]. Its ``chunk_state`` is the state that
      enters the chunk.

    The notation is that of Forge (Listings 1 and 3).

    On CPU, and with inputs in float64 on any device, the functions run in PyTorch: in float32, or in the inputs' dtype
    if that is wider, whatever autocast says. Casts of floating tensors in the functions are dropped. On GPUs a call
    runs kernels, which are generated from the functions at the first call; `explain` names their file. Kernels carry
    factors of the state, or of its rows, as logarithms, so these factors must not be negative. Under torch.compile a
    call is one node of the graph, for all lengths and batch sizes.

    Args:
        input_meta: name -> SymbTensor, or a number that the functions get as it is. Tensors with the size "T" are
            tokens [T, H, ...]; others are parameters [H, ...]. "prev_s" [NS, H, K, V] (or [NS, H, K]) is the state;
            "chunk_state" may repeat its shape.
        chunk_mode: the function of what a chunk adds to the state. In all three functions, arguments with defaults
            that are no inputs keep them.
        decay_mode: the function of how a chunk changes the state.
        merge_mode: the function of the outputs.
        sp_group: SequenceParallel over whose ranks calls run that give no ``sp``; or a ProcessGroup over whose ranks
            `flexsp.init_sequence_parallel` was called.
        enable_aot: compile the kernels now into Triton's cache (TRITON_CACHE_DIR), where later calls of any process
            find them: for all combinations of the ConstExprs, in the dtypes of ``input_meta``, for the GPU that is
            there or else for compute capability FLEXSP_AOT_ARCH (90). Inputs of other dtypes or with other strides,
            and calls with ``prev_s``, still compile at their first call. `flexsp compile --variant` compiles what calls
            of one size launch, engines' kernels too, in processes side by side.
        code_dir: folder of the generated kernels' file; FLEXSP_CODE_DIR or a folder in the user's cache if None.
        chunk_size: tokens of a chunk. None lets the plan choose it; results must then not depend on where chunks end.
            With a number they may, and then shards must start on edges of chunks.
        autotune: on GPUs, the first call of each signature times plans (chunk size, segments, tiles, warps, stages)
            and takes the quickest. This takes seconds to minutes, mostly for compilation. `explain` then says how much
            slower the plan without autotune was.
        lowering: "auto" runs the kernels of ``lowerings`` and the PyTorch code of those that are for this
            ``chunk_size``; "generated" runs generated kernels and the functions.
        lowerings: engines of hand-written kernels for these functions, each a `flexsp.compiler.Lowering`, in the order
            in which they are asked. The first that takes a call runs it.
        fallback: for calls on a GPU that no kernels can run. None raises NotAvailable, which gives the reason;
            "pytorch" runs the functions in PyTorch, many times slower, and warns once. `explain` and `runs` tell
            which calls these are.

    Raises:
        CompileError: a function cannot be traced, is not causal, or has wrong shapes; names function, line and remedy.
        ValueError: bad input_meta.
        NotAvailable: enable_aot where no kernels can be generated.
    """

    rows: int  # rows of inputs for one token of `SequenceParallel.lengths`; graph names depend on it
    # Grouped inputs: how many heads of the state share one head of theirs, and how many of its rows share one row.
    # Only an engine runs such calls.
    heads_per_key: Mapping[str, int] = {}
    rows_per_token: Mapping[str, int] = {}
    remedy = 'Change that, or pass fallback="pytorch" to run the functions in PyTorch, many times slower.'

    def __init__(
        self,
        input_meta: Mapping[str, Any],
        chunk_mode: Callable[..., torch.Tensor],
        decay_mode: Callable[..., torch.Tensor],
        merge_mode: Callable[..., torch.Tensor],
        sp_group: SequenceParallel | torch.distributed.ProcessGroup | None = None,
        enable_aot: bool = False,
        code_dir: str | os.PathLike[str] | None = None,
        chunk_size: int | None = None,
        autotune: bool = False,
        fallback: str | None = None,
        lowering: str = "auto",
        lowerings: Sequence[Lowering] = (),
    ) -> None:
        if lowering not in ("auto", "generated"):
            raise ValueError(f'lowering: expected "auto" or "generated", got {lowering!r}')
        if fallback not in (None, "pytorch"):
            raise ValueError(f'fallback: expected None or "pytorch", got {fallback!r}')
        if chunk_size is not None and (type(chunk_size) is not int or chunk_size < 1):
            raise ValueError(f"chunk_size: expected a positive integer, got {chunk_size!r}")
        if code_dir is not None and not isinstance(code_dir, (str, os.PathLike)):
            raise ValueError(f"code_dir: expected a path or None, got {code_dir!r}")
        meta = InputMeta.of(input_meta)
        self._sizes, self.rows = meta.sizes(), meta.rows or 1
        self._sp, self._C = ranks_of(sp_group), chunk_size
        self._code_dir = None if code_dir is None else os.fspath(code_dir)
        self._told: set[str] = set()
        self._autotune, self._fallback = autotune, fallback
        self._tuned: list[str] = []
        self._calls: dict[Any, _Call] = {}
        engines = in_order(lowerings)
        self.report = check(functions_of(meta, chunk_size is not None, chunk_mode, decay_mode, merge_mode))
        self.program: Program = replace(self.report.program, lowerings=engines if lowering == "auto" else ())
        self.names = (*meta.tokens, *meta.params)
        self.graph_name = torch_compile.name_of(self)
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
            prev_s: initial states [N, H, *state], N = B or the number of documents; zeros if None. In float32, or in
                float64 if an input is. Under ``sp`` without ``cu_seqlens`` only the first rank gives them.
            cu_seqlens: int32 or int64 [N+1], global boundaries of packed documents; B must be 1. Where kernels run,
                its values are checked only under FLEXSP_CHECK=1.
            sp: as for the ops: None takes the ambient group or ``sp_group``, False runs on this rank alone.

        Returns:
            o [T, H, V] or [B, T, H, V] in the dtype of the first tensor of ``input_meta``, and the final states
            [N, H, *state]; under ``sp`` without ``cu_seqlens`` None on all ranks but the last.
        """
        if torch.compiler.is_compiling():
            group = resolve_sp(self._sp if sp is None and self._sp is not None else sp)
            inputs, cu_seqlens = arguments.asked(self.program.meta, inputs, cu_seqlens, group)
            if len(inputs) != len(self.names) or any(name not in inputs for name in self.names):
                raise ValueError(f"inputs: expected {sorted(self.names)}, got {sorted(inputs)}")
            found = torch_compile.call(self.graph_name, [inputs[x] for x in self.names], prev_s, cu_seqlens, group)
            return arguments.answered(self.program.meta, group, *found)
        return self._call(inputs, prev_s, cu_seqlens, sp)

    def step(self, *, prev_s: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """Outputs of a few tokens, for decoding, as a call gives them. The states ``prev_s`` are changed in place.

        On a GPU one generated kernel reads the states, moves them over the tokens and writes them back, in float32
        whatever their dtype. It runs on this rank alone, and has no gradients.

        Args:
            prev_s: states [B, H, *state], contiguous, float32 or bfloat16, float64 if an input is; B = 1 without B.
                Their memory is no input's.
            inputs: as of a call, with 16 tokens at most: one, or those of a draft.

        Raises:
            ValueError: a wrong shape, dtype or device.
            NotAvailable: gradients are asked for; chunks are part of the model; or no kernel can run the call on a GPU,
                and there is no ``fallback``.
        """
        return decode(self, prev_s, inputs)

    def _call(
        self, inputs: dict[str, torch.Tensor], prev_s: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
        sp: SequenceParallel | bool | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        sp = self._sp if sp is None and self._sp is not None else sp
        try:
            group = resolve_sp(sp, keeps_bits=True)
            inputs, cu_seqlens = arguments.asked(self.program.meta, inputs, cu_seqlens, group)
            # the custom operators do not tune, so with autotune a call has one plan, whether or not a mode watches it
            usual = (in_memory if self._autotune else plain)(*inputs.values(), prev_s, cu_seqlens)
            if group is not None and group.segment:
                found = in_segments.run(self, group, inputs, prev_s, cu_seqlens)
            elif not usual and self._has_kernels(inputs, prev_s, cu_seqlens):
                found = torch_compile.call_now(self, inputs, prev_s, cu_seqlens, group)
            else:
                found = self._over(group, inputs, prev_s, cu_seqlens)
            return arguments.answered(self.program.meta, group, *found)
        except Exception as error:
            count_failed_call(error, sp)
            raise

    def _over(
        self, group: SequenceParallel | None, inputs: dict[str, torch.Tensor], prev_s: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        backward = self._autotune and torch.is_grad_enabled()
        backward = backward and any([getattr(x, "requires_grad", False) for x in inputs.values()])
        # a plan that was tuned for the forward pass alone may be slow for both
        signature = (*signature_of(inputs, prev_s, cu_seqlens, group), backward)
        call, shard, bounds = self.found(signature, inputs, prev_s, cu_seqlens, group)
        executable = call.executable
        if executable is not None:
            tuned = self._autotune and executable.device.type == "cuda"
            if tuned and not call.tuned:
                from flexsp.compiler.autotune import autotuned

                executable, line = autotuned(executable, inputs, prev_s, cu_seqlens, group, shard, backward)
                self._tuned = [*self._tuned[1 - _CALLS :], *([] if line is None else [line])]
                self._calls[signature] = replace(call, executable=executable, tuned=True)
            key = None if tuned else self.graph_name
            return run(executable, key, [inputs[name] for name in executable.names], prev_s, cu_seqlens, shard)
        return self.in_pytorch(call, inputs, prev_s, bounds, group)

    def _has_kernels(self, inputs: dict[str, torch.Tensor], prev_s: Any, cu_seqlens: Any) -> bool:
        """Whether kernels run calls with such inputs; False for inputs that a call refuses."""
        tokens, params, _ = self._sorted(inputs)
        first = next(iter(tokens.values()))
        odd = any([x is not None and not isinstance(x, torch.Tensor) for x in (prev_s, cu_seqlens)])
        odd = odd or transformed() or (cu_seqlens is not None and cu_seqlens.dim() != 1)
        if odd or not asks_for_kernels(first.is_cuda, arguments.widest(*tokens.values(), *params.values())):
            return False
        looks = arguments.looks(tokens, params)
        return self._refusal(self._known(tokens, params), looks, first.is_cuda) is None

    def prepared(
        self, tensors: Sequence[torch.Tensor], prev_s: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
        group: SequenceParallel | None,
    ) -> _Found:  # fmt: skip
        """`found` for a call in a graph of torch.compile. Its plan is never tuned, since sizes of the graph's tensors
        depend on it."""
        x = dict(zip(self.names, tensors, strict=True))
        return self.found(("graph", *signature_of(x, prev_s, cu_seqlens, group)), x, prev_s, cu_seqlens, group)

    def found(
        self, signature: tuple[Any, ...], inputs: dict[str, torch.Tensor], prev_s: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None, group: SequenceParallel | None,
    ) -> _Found:  # fmt: skip
        """The call; (its first token, its end, the tokens of all ranks); boundaries of documents if they are read."""
        call = self._kept_or_checked(signature, inputs, prev_s, cu_seqlens, group)
        shard = arguments.shard_of(call.T, self.rows, cu_seqlens, group)
        bounds = None if cu_seqlens is None else boundaries(cu_seqlens, shard[2], call.executable is None, self.rows)
        if self.program.disagrees is not None:
            arguments.check_edges(group, call.T, bounds, self.pytorch_chunk, self.rows)
        self.same_call(inputs, call, cu_seqlens, bounds, group)
        return call, shard, bounds

    def again(
        self, tensors: Sequence[torch.Tensor], prev_s: torch.Tensor | None, n_docs: int, group: SequenceParallel | None
    ) -> _Call:
        """The call that `prepared` found, for its backward pass. Boundaries of documents are not read."""
        x = dict(zip(self.names, tensors, strict=True))
        bounds = torch.empty(n_docs + 1, dtype=torch.int64, device=tensors[0].device) if n_docs else None
        return self._kept_or_checked(("again", *signature_of(x, prev_s, bounds, group)), x, prev_s, bounds, group)

    def _kept_or_checked(
        self, signature: tuple[Any, ...], inputs: dict[str, torch.Tensor], prev_s: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None, group: SequenceParallel | None,
    ) -> _Call:  # fmt: skip
        call = self.remembered(signature)
        if call is None:
            call = self.checked(inputs, prev_s, cu_seqlens, group)
            keep(self._calls, signature, call, _CALLS)
        return call

    def same_call(
        self, inputs: dict[str, torch.Tensor], call: _Call, cu_seqlens: torch.Tensor | None, bounds: list[int] | None,
        group: SequenceParallel | None,
    ) -> None:  # fmt: skip
        """Under FLEXSP_CHECK=1: PeerMismatch unless all ranks make the same call."""
        if group is not None and group.check_calls:
            tokens = self.program.meta.tokens
            widths = [tuple(inputs[name].shape[inputs[name].dim() - len(x.shape) + 1 :]) for name, x in tokens.items()]
            description = self.program.description(inputs[next(iter(tokens))].dtype, cu_seqlens is not None)
            group.check_signature((description, *widths, call.states, "boundaries", bounds))

    def make_kernels(self, on_gpu: bool, dtype: torch.dtype) -> None:
        """Generates the kernels, if calls of such tensors may need them."""
        if asks_for_kernels(on_gpu, dtype):
            self._derived()

    def width(self, inputs: dict[str, torch.Tensor], prev_s: torch.Tensor | None) -> int:
        """Columns of the outputs."""
        size = self.program.value_sizes[0]
        tokens, params, _ = self._sorted(inputs)
        if not isinstance(size, int):
            return self._size(size, self._known(tokens, params), prev_s)
        one = {name: torch.empty((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device) for name, x in tokens.items()}
        state = None if prev_s is None else prev_s[:1]
        call = self.checked(one | params, state, None, None)
        with torch.no_grad():
            return self.in_pytorch(call, one | params, state, None, None)[0].shape[-1]

    def __getstate__(self) -> dict[str, Any]:
        """Other processes generate their kernels again."""
        return {name: x for name, x in self.__dict__.items() if name != "_generated"} | {"_calls": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.graph_name = torch_compile.name_of(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearAttention:
        """The object itself: copies of a module run the same kernels."""
        return self

    def likeness(self) -> str:
        """Text that differs for variants that may compute or save different values; the same in every process."""
        program = self.program
        traced = (program.chunk, program.decay, program.merge)
        graphs = [(x.name, x.arguments, x.cached, [node.format_node() for node in x.graph.nodes]) for x in traced]
        engines = [x.name for x in program.lowerings]
        options = self._sizes, self._C, self._fallback, engines, self.rows, self.rows_per_token, self.heads_per_key
        return repr((graphs, program.meta, program.transition, *options))

    def remembered(self, signature: tuple[Any, ...]) -> _Call | None:
        """The call that an earlier call of the signature made."""
        return self._calls.get(signature)

    def in_pytorch(
        self, call: _Call, inputs: dict[str, torch.Tensor], prev_s: torch.Tensor | None, bounds: list[int] | None,
        group: SequenceParallel | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        tokens, params, batched = self._sorted(inputs)
        first = next(iter(tokens.values()))
        tokens, params = ({name: x.to(call.wide) for name, x in each.items()} for each in (tokens, params))
        tokens |= {name: clamped(tokens[name]) for name in self.program.meta.clamped}
        description, cu_seqlens = self.program.description(first.dtype, bounds is not None), None
        if bounds is not None:
            description, cu_seqlens = f"{description}, boundaries {bounds}", torch.tensor(bounds, device=first.device)
        engines = [x for x in self.program.lowerings if x.chunk_size == self._C]
        with arguments.no_autocast(first.device.type):
            given = tokens | params, prev_s, cu_seqlens, group, description
            asked = (x.in_pytorch(self.program, *given) for x in engines)
            found = next((x for x in asked if x is not None), None)
            o, final = found or functions.run(
                self.program, tokens, params, prev_s, call.states[2:], bounds, self.pytorch_chunk, group, self.rows,
                description,
            )  # fmt: skip
        return (o if batched else o[0]).to(first.dtype), final

    def checked(
        self, inputs: dict[str, torch.Tensor], prev_s: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
        group: SequenceParallel | None,
    ) -> _Call:  # fmt: skip
        """The call for such tensors; ValueError if they do not fit the program."""
        meta = self.program.meta
        tokens, params, _ = self._sorted(inputs)
        first = next(iter(tokens.values()))
        wide = arguments.widest(*tokens.values(), *params.values())
        names = self._known(tokens, params)
        if group is not None and group.device.type != first.device.type:
            raise ValueError(f"sp: expected a group on the inputs' {first.device.type}, got one on {group.device}")
        name = next(iter(tokens))
        B, T, H = first.shape[:3]
        T, H = T * self.rows_per_token.get(name, 1), H * self.heads_per_key.get(name, 1)
        N = B
        if cu_seqlens is not None:
            check_boundaries(cu_seqlens, B, first.device)
            N = cu_seqlens.numel() - 1
        states = (N, H, *(self._size(s, names, prev_s) for s in meta.state_sizes))
        check_initial(prev_s, states, first.device, wide, cu_seqlens is not None, group)
        code = self._kernels(first, wide, names, arguments.looks(tokens, params), (*inputs.values(), prev_s))
        executable = None
        if code is not None:
            from flexsp.compiler.dispatch import executable_of

            given = {name: inputs[name] for name in (*meta.tokens, *meta.params)}
            try:
                executable = executable_of(code, given, prev_s, cu_seqlens, group)
            except NotEmittable as error:  # a lowering serves such calls, but did not take this one
                self._refused(str(error))
        return _Call(T, states, wide, executable)

    def _compile_ahead(self) -> None:
        code = self._derived()
        if isinstance(code, str):
            raise NotEmittable(f"enable_aot: there are no kernels to compile: {code}")
        from flexsp.compiler.aot import compile_ahead, target_of_host

        compile_ahead(code, self.program.meta, target_of_host())

    @ft.cached_property
    def _generated(self) -> Generated | str:
        """The kernels made of the functions, or why there are none.

        Deriving them takes seconds. A variant with lowerings derives them at the first call that none of these runs.
        """
        try:
            from flexsp.compiler.backend.generated_kernels import generated

            code: Generated = one_at_a_time(
                lambda: generated(self._for_kernels(), self._code_dir, self._C), self.program.merge.name
            )
            if not self.program.lowerings:
                code.derive()
            return code
        except ImportError as error:
            return f"Triton is not there ({error})"
        except NotEmittable as error:
            return str(error)

    def _derived(self) -> Generated | str:
        """`_generated` with its kernels derived, or why there are none."""
        if isinstance(self._generated, str):
            return self._generated
        try:
            self._generated.derive()
        except NotEmittable as error:
            return str(error)
        return self._generated

    def _for_kernels(self) -> Program:
        """The program that kernels are made of; NotEmittable where there are none for it."""
        return self.program

    def _kernels(
        self, first: torch.Tensor, wide: torch.dtype, names: dict[str, int], looks: dict[str, TensorSpec],
        given: tuple[torch.Tensor | None, ...],
    ) -> Generated | None:  # fmt: skip
        """The kernels for this call; None if the functions run in PyTorch, NotEmittable if neither may run."""
        if not asks_for_kernels(first.is_cuda, wide):
            tell(logging.INFO, f"fallback: {self.program.merge.name} {_without_kernels(wide)}")
            return None
        if transformed() or any(x is not None and aligned(x) is None for x in given):
            reason: str | None = f"kernels have no derivatives in forward mode and no {TRANSFORMS}"
        else:
            reason = self._refusal(names, looks, first.is_cuda)
        if reason is None:
            code = self._generated
            assert not isinstance(code, str)
            return code
        self._refused(reason)
        return None

    def _refused(self, reason: str) -> None:
        """Warns, once for each reason, that a call runs in PyTorch; NotEmittable where it may not."""
        if self._fallback is None:
            raise NotEmittable(f"{self.program.merge.name}: no kernels run this call: {reason}. {self.remedy}")
        if reason not in self._told:
            self._told.add(reason)
            tell(logging.INFO, f"fallback: {self.program.merge.name} runs in PyTorch: {reason}")
            warnings.warn(f"{self.program.merge.name}: runs in PyTorch, slowly: {reason}", stacklevel=4)

    def _refusal(self, names: dict[str, int], looks: dict[str, TensorSpec], on_gpu: bool) -> str | None:
        """Why no kernels run calls with inputs of these sizes, dtypes and shapes; None if kernels do."""
        code = self._generated
        if isinstance(code, str):
            return code
        from flexsp.compiler.dispatch import refusal

        return refusal(code, names, looks, on_gpu)

    def runs(
        self, *, prev_s: torch.Tensor | None = None, sp: SequenceParallel | bool | None = None, **inputs: torch.Tensor
    ) -> str:
        """A sentence that says what runs a call with these tensors. It computes and sends nothing.

        Raises:
            ValueError: inputs that a call would refuse.
        """
        inputs = arguments.alike(self.program.meta, inputs)
        tokens, params, _ = self._sorted(inputs)
        first, wide = next(iter(tokens.values())), arguments.widest(*tokens.values(), *params.values())
        if not asks_for_kernels(first.is_cuda, wide):
            return _without_kernels(wide)
        group = resolve_sp(self._sp if sp is None and self._sp is not None else sp, keeps_bits=True)
        reason = self._refusal(self._known(tokens, params), arguments.looks(tokens, params), first.is_cuda)
        asked = not reason and self.program.lowerings
        executable = self.checked(inputs, prev_s, None, group).executable if asked else None
        if executable is None:
            return self._outcome(reason)
        part = getattr(executable.plan, "lowering", None)
        engine = executable.engine if part is None else part.name
        return self._outcome(reason) if engine is None else f"runs kernels of the engine {engine}"

    def _outcome(self, reason: str | None) -> str:
        if reason is None:
            return "runs generated kernels"
        if self._fallback is None:
            return f"raises, since no kernels run it: {reason}. {self.remedy}"
        return f'runs in PyTorch (fallback="pytorch"): {reason}'

    @property
    def kernels(self) -> Generated:
        """The generated kernels; NotAvailable where there are none."""
        code = self._derived()
        if isinstance(code, str):
            raise NotEmittable(f"{self.program.merge.name}: no generated kernels: {code}")
        return code

    def explain(self, T: int = 16384, B: int = 1, graph: bool = False) -> str:
        """A page about the program: what `check` found, where calls run, the file of its kernels, and a plan.

        The plan is that of a call of T tokens with the largest sizes that ``input_meta`` allows (32 heads where it
        names no number), in the dtype of its first tensor. It lists schedule, chunks and tiles, and the bytes and
        microseconds that each launch is predicted to take, on the GPU that is there or else on an H200.

        Args:
            T, B: tokens and sequences of the planned call.
            graph: add what each kernel reads and writes, and the graphs of the three functions.
        """
        from flexsp.compiler.page import page

        return page(self, T, B, graph)

    @property
    def pytorch_chunk(self) -> int:
        """Tokens of a chunk where the functions run in PyTorch."""
        return self._C or _CHUNK

    def largest(self) -> dict[str, int]:
        """The largest of the sizes that ``input_meta`` allows, by name."""
        return {name: max(choices) for name, choices in self._sizes.items()}

    def __repr__(self) -> str:
        from flexsp.compiler.page import short

        return short(self)

    def _sorted(self, inputs: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], bool]:
        return arguments.tokens_and_params(self.program.meta, inputs)

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
            for axis, (key, n) in enumerate(zip(keys, x.shape, strict=True)):
                n *= (self.rows_per_token, self.heads_per_key)[axis - 1].get(name, 1) if axis in (1, 2) else 1
                allowed = (key,) if isinstance(key, int) else (found[key],) if key in found else self._sizes.get(key)
                if allowed is not None and n not in allowed:
                    want = " or ".join(map(str, allowed))
                    got = f"{n} in [{', '.join(map(str, keys))}] = {list(x.shape)}"
                    raise ValueError(f"{name}: expected size {key} = {want}, got {got}")
                if not isinstance(key, int):
                    found[key] = int(n)  # a tensor in traces of TorchScript
        return found

    def _size(self, size: Size, names: dict[str, int], prev_s: torch.Tensor | None) -> int:
        """A size of the state: from an input that has it, else its only choice, else the size of ``prev_s``."""
        if not isinstance(size, ConstExpr):
            return int(size)
        choices, at = self._sizes[size.name], self.program.meta.state_sizes.index(size) + 2
        if size.name in names or len(choices) == 1:
            return names.get(size.name, choices[0])
        if prev_s is None or prev_s.dim() <= at or prev_s.shape[at] not in choices:
            raise ValueError(f"{STATE}: expected, since no input tells {size.name} of {list(choices)}")
        return prev_s.shape[at]


def _without_kernels(dtype: torch.dtype) -> str:
    """What is said of a call that asks for no kernels."""
    why = "kernels have no float64" if dtype == torch.float64 else "the tensors are on CPU"
    return f"runs in PyTorch: {why}"


@dataclass(frozen=True)
class _Call:
    """What all calls of one signature share: this rank's tokens, shape and dtype of the states, the executable."""

    T: int
    states: tuple[int, ...]
    wide: torch.dtype
    executable: Executable[Any] | None
    tuned: bool = False


_Found = tuple[_Call, tuple[int, int, int], list[int] | None]
