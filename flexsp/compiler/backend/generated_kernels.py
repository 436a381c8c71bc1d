"""Stage 5c: the kernels of one program, in a file named by the hash of their source."""

from __future__ import annotations

import atexit
import hashlib
import linecache
import math
import os
import re
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton

from flexsp.compiler.backend.body import Kernel, Layout
from flexsp.compiler.backend.decode import decode_kernel
from flexsp.compiler.backend.exact import EXACT, exact_kernels
from flexsp.compiler.backend.places import places
from flexsp.compiler.backend.skeleton import make_kernel
from flexsp.compiler.backend.walks import WALKS
from flexsp.compiler.frontend.meta import KERNELS_OWN, ConstExpr
from flexsp.compiler.frontend.program import Program
from flexsp.compiler.graphs.differentiate import Step, differentiate, state_names
from flexsp.compiler.graphs.intrinsics import SUMS
from flexsp.compiler.graphs.rewrite import dims
from flexsp.compiler.graphs.stages import Stage, for_users, make_stages, split_gradients
from flexsp.compiler.graphs.values import NotEmittable
from flexsp.exceptions import NotAvailable
from flexsp.runtime.clean_thread import in_turn, one_at_a_time
from flexsp.scan.dense import MOST
from flexsp.scan.transitions import KINDS

__all__ = ["CHUNKS", "NARROWEST", "WHOLE", "Generated", "generated", "in_pieces", "padded", "write_code"]

CHUNKS = (16, 32, 64, 128, 256)
"""Chunk sizes that kernels are made for: powers of two that tensor cores multiply without padding."""
NARROWEST = 32
"""The smallest side of a tile."""
WHOLE = 128
"""Up to which sizes are in one tile of chunkwise kernels; of a state's rows and columns, one may be `MOST`."""

_IMPORTS = """
import triton
import triton.language as tl

from flexsp.compiler.backend.tile_ops import (
    HORIZON, below, clamped, col_of, eye, keep_cols, keep_rows, larger, largest, only_col, only_row, product, row_of,
    smaller, smallest, sum_over, where_open,
)
from flexsp.kernels.primitives import chunk_info, load_rows, load_state, mm, store_columns, store_rows, store_state
from flexsp.runtime.launch import begin
"""
_IN_CODE = re.compile(  # variables of the code, which sizes must not be named like
    r"(APART|BOUNDARY|DOT|ENTERS|H|LEAVES|PACKED|PDL|PREC|b|boundary|c|c0|c1|chunk_states|cut|cuts|decay|doc|edge|entering|"
    r"exact\w*|EXACT_C|first|h|last|leaving|left|length|n|n_chunks|n_seg|part|per_seg|row|rows|seg|start|states|table|"
    r"total|transition|v0)$"
    r"|(at|mm)_"
)


_made: weakref.WeakValueDictionary[Any, Generated] = weakref.WeakValueDictionary()


def padded(n: int) -> int:
    """The tile size for n."""
    return max(NARROWEST, 1 << (n - 1).bit_length())


def in_pieces(layout: Layout, dense: bool, sizes: Mapping[str, int], half: bool = True) -> bool:
    """Whether chunkwise kernels for such sizes hold the columns of a state in pieces. half: their products are of
    bf16; those of fp32 take twice the memory, and dense transitions hold the most tiles beside the state."""
    blocks = {name: padded(sizes[name]) for name in layout.sizes}
    state = [blocks.pop(name) for name in layout.state]
    most = max([*blocks.values(), *(state[:1] if dense else [])], default=0)
    held = WHOLE * (MOST if half or not dense else WHOLE)
    return len(state) == 2 and (most > WHOLE or state[1] > MOST or math.prod(state) > held)


def generated(program: Program, code_dir: str | None = None, chunk_size: int | None = None) -> Generated:
    """The kernels of a program, made once for all that are alike: the layers of a model share them."""
    key = (_likeness(program), code_dir, os.environ.get("FLEXSP_CODE_DIR"), chunk_size)
    found = _made.get(key)
    if found is None:
        found = _made[key] = Generated(program, code_dir, chunk_size)
    return found


def _refuse_transition(program: Program) -> None:
    """NotEmittable for what kernels cannot carry from segment to segment."""
    name, line = program.decay.name, program.decay.line
    if program.transition == "elementwise" and program.parts:
        raise NotEmittable(
            f"the transition of {name!r} (at {line}) is elementwise, with a factor for each number of the state; of a "
            "state in several parts kernels take one for each head or each row, so make it of gates [C] or [C, K]"
        )
    if program.transition == "sequential":
        raise NotEmittable(
            f"{name!r} (at {line}) is not affine in the state, and kernels carry states as A S + F or max(S + a, F), "
            "with A, a and F that do not depend on S"
        )


def _likeness(program: Program) -> Any:
    """What the kernels depend on; not the values that sizes may take."""
    graphs = []
    for traced in (program.chunk, program.decay, program.merge):
        nodes = [(x.name, x.op, x.target, repr((x.args, x.kwargs))) for x in traced.graph.nodes]
        graphs.append((traced.name, traced.arguments, traced.cached, tuple(nodes)))
    meta = program.meta
    inputs = [(name, _sizes(x.shape), x.dtype, x.clamped) for name, x in (*meta.tokens.items(), *meta.params.items())]
    return (
        tuple(graphs), tuple(inputs), tuple(meta.numbers.items()), _sizes(meta.state.shape), program.transition,
        _sizes(program.value_sizes), program.parts, program.lowerings,
    )  # fmt: skip


def _sizes(shape: Sequence[Any]) -> tuple[str, ...]:
    return tuple(x.name if isinstance(x, ConstExpr) else str(x) for x in shape)


class _Derivation:
    """What is made of a program: its step, differentiated and cut into stages, and the kernels. It takes seconds.

    Raises:
        NotEmittable: there are no kernels for the program.
    """

    def __init__(self, program: Program, pieces: bool) -> None:
        self.program, self.pieces, self.dense = program, pieces, program.transition == "dense"
        step = differentiate(program)
        self.stages = make_stages(step)
        self.saved = self._saved(step)
        given = [*self.saved, *(name for stage in self.stages if stage.backward for name in stage.leaves)]
        gradients = [f"d_{name}" for name in (*step.tokens, *step.params)]
        self.inverts = any(x.kind == "inverse" for x in step.intrinsics)
        self.step, self.parts, self.small, self.sums = split_gradients(step, gradients, given)
        self.layout = self._layout()
        self.kernels: dict[str, Kernel] = self._make()
        if step.condition:
            raise NotEmittable(
                "kernels compute the same for all sizes, and the functions do something else for others: they were "
                f"traced where {step.condition}. C are the tokens of a chunk, from 1 to its size; a slice such as "
                "x[:16] is one thing for 10 tokens and another for 20"
            )

    def _layout(self) -> Layout:
        graph = self.step.graph
        found = {node.name: dims(node) for node in graph.nodes if node.op == "placeholder"}
        kept = self.step.kept
        rows, cols = ("1", *found["S"])[-2:]
        inverted = [x.results[0] for x in self.step.intrinsics if x.kind == "inverse"]
        strange = [name for name in inverted if kept[name].dims != ("C", "C")]
        if strange:
            raise NotEmittable(
                f"{for_users(self.step, strange)}: kernels compute inverses of [C, C] only, one number for each two "
                f"tokens of a chunk, and this one is [{', '.join(kept[strange[0]].dims)}]"
            )
        tokens = {name: found[name] for name in self.step.tokens} | {"do": found["do"]}
        params = {name: found[name] for name in self.step.params}
        self._refuse_inputs(tokens, params)
        parts = self.program.parts
        places((rows, cols) if rows != "1" else (cols,), parts)  # raises for one that no kernel holds
        sizes = {s for x in (*found.values(), *(x.dims for x in kept.values())) for s in x if s != "C"}
        self._refuse_names(rows, cols, found["do"], sizes)
        clamped = self.program.meta.clamped
        return Layout(rows, cols, tuple(sorted(sizes)), tokens, params, kept, parts, clamped)

    def _refuse_inputs(self, tokens: dict[str, tuple[str, ...]], params: dict[str, tuple[str, ...]]) -> None:
        """NotEmittable for inputs of more axes than kernels read, and for values of a chunk that they do not keep."""
        rows = "give a token's rows as inputs of their own, or as SymbTensor(..., rows=n)"
        for name, sizes in tokens.items():
            if len(sizes) > 2:
                got = ", ".join(["T", "H", *sizes[1:]])
                raise NotEmittable(f"{name}: kernels take tokens [T, H] or [T, H, N], got [{got}]; {rows}")
        for name, sizes in params.items():
            if len(sizes) > 2:
                got, remedy = ", ".join(["H", *sizes]), "multiply tokens by it before the call"
                raise NotEmittable(f"{name}: kernels take parameters [H], [H, N] or [H, N, M], got [{got}]; {remedy}")
        given = {s for node in self.step.graph.nodes if node.op == "placeholder" for s in dims(node)}
        for name, kept in self.step.kept.items():
            if len(kept.dims) > 2 or any(s.isdigit() and s not in given for s in kept.dims):
                raise NotEmittable(
                    f"{for_users(self.step, [name])} is [{', '.join(kept.dims)}]; kernels keep values of two axes at "
                    "most, whose sizes are ConstExprs"
                )

    def _refuse_names(self, rows: str, cols: str, outputs: tuple[str, ...], sizes: set[str]) -> None:
        """NotEmittable where sizes cannot be told apart in the code."""
        numbers = sorted(s for s in sizes if s.isdigit())
        ours = {*KERNELS_OWN, *re.findall(r"\w+", _IMPORTS), *(f"B{s}" for s in sizes)}
        taken = sorted(s for s in sizes - set(numbers) if s in ours or _IN_CODE.match(s))
        if numbers:
            raise NotEmittable(
                f"the sizes {', '.join(numbers)} are plain numbers in input_meta; kernels need names, such as "
                f"ConstExpr('K', {numbers[0]})"
            )
        if rows == cols:
            raise NotEmittable(
                f"the state is [{rows}, {cols}]; kernels need two names, such as ConstExpr('K', 64) and "
                "ConstExpr('V', 64), whose values may be equal"
            )
        if taken:
            what = ", ".join(f"the size {s!r}" for s in taken)
            raise NotEmittable(f"{what} would hide a name in the code of kernels: choose another name")
        if outputs != ("C", cols):
            raise NotEmittable(
                f"outputs are [{', '.join(outputs)}], at {self.program.merge.line}; kernels need [C, {cols}], the last "
                "size of the state in the last axis"
            )

    def _make(self) -> dict[str, Kernel]:
        step, kept = self.step, self.saved
        decays = self.program.transition != "none" and not self.dense
        of_stages = [name for stage in self.stages if stage.backward for name in stage.leaves]
        wanted: dict[str, tuple[list[list[str]], Sequence[str]]] = {}
        for stage in self.stages:
            if stage.writes:
                wanted[stage.kind] = ([[f"keep_{name}" for name in stage.writes]], stage.given)
        states = state_names(self.program)
        before = [f"d_{name}" for name in states]
        maxima = self.program.transition == "max-plus"  # what passes depends on the state
        carried = ["shift"] if maxima else [f"A{name[1:]}" for name in states] if decays else []
        wanted["summarize"] = ([[*states, *carried]], kept)
        wanted["summarize_backward"] = ([[*before, *(["A"] if maxima else [])]], kept)
        wanted |= {"output": ([["o", *states]], kept), "chunk_states": ([states], kept)}
        wanted["output_backward"] = ([before], kept)
        wanted["grads"] = (self.parts, [*kept, *of_stages])
        if self.small:
            wanted["reduce_gate_grads"] = ([self.small], [*kept, *of_stages, *self.sums])
        made = {
            kind: make_kernel(step, self.layout, kind, parts, given, self.program.transition, self.pieces)
            for kind, (parts, given) in wanted.items()
        }
        if not self.inverts or self.program.disagrees is not None:
            return made
        walks = {kind: outputs for kind, ([outputs, *_], _) in wanted.items() if kind in WALKS}
        gradients = [f"d_{name}" for name in (*step.tokens, *step.params)]
        return made | exact_kernels(step, self.layout, walks, gradients, self.program.transition)

    def _saved(self, step: Step) -> tuple[str, ...]:
        """Saved values that the forward leaves for the walks and the backward."""
        for_backward = {name for x in step.intrinsics if x.backward for name in x.args}
        found = [name for stage in self.stages if not stage.backward for name in stage.leaves]
        scratch = {n for x in step.intrinsics for n in x.args} - for_backward
        return tuple(name for name in found if name not in scratch or step.kept[name].running)


def _derived(name: str) -> Any:
    """A property of `Generated` that is this attribute of its `_Derivation`."""
    return property(lambda code: getattr(code.derive(), name))


class Generated:
    """The kernels of one program: their sources, and the module they were written to.

    `flexsp.compiler.planning` plans what runs them. With `pieces`, chunkwise kernels take the state's columns in
    pieces. The kernels are derived when something of them is first read, which takes seconds, and raises NotEmittable
    if there are none: a call that a lowering runs whole never needs them.
    """

    step: Step = _derived("step")
    stages: list[Stage] = _derived("stages")
    saved: tuple[str, ...] = _derived("saved")
    inverts: bool = _derived("inverts")
    small: list[str] = _derived("small")
    layout: Layout = _derived("layout")
    kernels: dict[str, Kernel] = _derived("kernels")

    def __init__(
        self, program: Program, code_dir: str | None = None, chunk_size: int | None = None, pieces: bool = False
    ) -> None:
        self.program, self.code_dir, self.chunk, self.pieces = program, code_dir, chunk_size, pieces
        self.dense = program.transition == "dense"
        self._found: _Derivation | str | None = None  # a text says why there are none
        _refuse_transition(program)
        if pieces and KINDS[program.transition].by_number:
            raise NotEmittable(
                f"the transition of {program.decay.name!r} (at {program.decay.line}) is {program.transition}; kernels "
                "of states of more than 128 x 256 take one factor for each head or each row, so make K or V smaller"
            )
        if chunk_size not in (None, *CHUNKS):
            raise NotEmittable(f"chunk_size = {chunk_size}: kernels are generated for {', '.join(map(str, CHUNKS))}")

    def derive(self) -> _Derivation:
        """Derives the kernels, once; NotEmittable if there are none, once more at each call."""
        if self._found is None and in_turn():
            self._set()
        elif self._found is None:
            one_at_a_time(self._set, self.program.merge.name)
        if not isinstance(self._found, _Derivation):
            raise NotEmittable(str(self._found))
        return self._found

    def _set(self) -> None:
        if self._found is None:  # else another thread was first
            try:
                self._found = _Derivation(self.program, self.pieces)
            except NotEmittable as error:
                self._found = str(error)  # the error itself would hold the frames of the attempt

    def products(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype whose products kernels make for inputs of `dtype`.

        Rounded inverses would be wrong by any factor where keys repeat. Such chunks are done again token by token, but
        not where results depend on where chunks end: these have products of float32 throughout.
        """
        whole = self.inverts and self.program.disagrees is not None
        return torch.float32 if whole and dtype == torch.bfloat16 else dtype

    def sized(self, sizes: Mapping[str, int], dtype: torch.dtype) -> Generated:
        """The kernels for inputs of such sizes: these, or those that take the columns of large states in pieces."""
        half = self.products(dtype) == torch.bfloat16
        return self._in_pieces if not self.pieces and in_pieces(self.layout, self.dense, sizes, half) else self

    @cached_property
    def _in_pieces(self) -> Generated:
        return Generated(self.program, self.code_dir, self.chunk, True)

    @cached_property
    def split(self) -> bool:
        """Whether every walk works on each of the state's columns alone."""
        walks = [kernel for kind, kernel in self.kernels.items() if kind in WALKS]
        return all(self.layout.cols not in kernel.contracted for kernel in walks)

    @cached_property
    def split_tokens(self) -> bool:
        """Whether kernels that go token by token do."""
        exact = [kernel for kind, kernel in self.kernels.items() if kind.startswith(EXACT)]
        return all(self.layout.cols not in kernel.contracted for kernel in exact)

    @cached_property
    def panels(self) -> bool:
        """Whether chunkwise kernels do too, of a vector state."""
        cols = self.layout.cols
        return len(self.layout.state) == 1 and all(cols not in kernel.contracted for kernel in self.kernels.values())

    @cached_property
    def source(self) -> str:
        return _source_of(self.program, self.kernels.values())

    @cached_property
    def path(self) -> Path:
        return _path_of(self.program.merge.name, self.source, self.code_dir)

    @cached_property
    def module(self) -> ModuleType:
        """The kernels, run from their source as it is here; their file is for those who read it, and for debuggers."""
        return _written(self.path, self.source)

    @cached_property
    def decode(self) -> tuple[Kernel, Any]:
        """The kernel that decodes, in a file of its own: what it reads and writes, and the kernel itself.

        Raises:
            NotEmittable: there is none.
        """
        kernel = decode_kernel(self.step, self.layout)
        source = _source_of(self.program, [kernel])
        return kernel, _written(_path_of(f"{self.program.merge.name}_decode", source, self.code_dir), source).decode


def _source_of(program: Program, kernels: Iterable[Kernel]) -> str:
    """The text of the file of some kernels."""
    traced = (program.chunk, program.decay, program.merge)
    names = [f"{role}: {x.name}" for role, x in zip(("chunk", "decay", "merge"), traced, strict=True)]
    body = "".join(f"\n\n{kernel.source}" for kernel in kernels)
    sums = [name for name in (*SUMS.values(), "add_product") if f" {name}(" in body]
    if sums:
        body = f"from flexsp.compiler.backend.tile_ops import {', '.join(sums)}\n{body}"
    body = _IMPORTS + body
    digest = hashlib.sha256((body + triton.__version__).encode()).hexdigest()[:16]
    header = f'"""Generated by flexsp from {", ".join(names)}.\n\nTriton {triton.__version__}, {digest}.\n"""\n'
    return header + body


def _path_of(name: str, source: str, code_dir: str | None) -> Path:
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    return Path(code_dir or os.environ.get("FLEXSP_CODE_DIR") or _users_folder()) / f"{name}_{digest}.py"


def _written(path: Path, source: str) -> ModuleType:
    write_code(path, source)
    return _run(path, source)


def _users_folder() -> Path:
    """In the user's cache; where that cannot be written, a folder of this process alone, which goes with it."""
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(named) if named else Path.home() / ".cache") / "flexsp" / "generated"
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        return _own_folder()
    return folder if os.access(folder, os.W_OK | os.X_OK) else _own_folder()


@cache
def _own_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="flexsp-generated-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def write_code(path: Path, source: str) -> None:
    """Makes `path` hold `source`: written whole, by renaming, where it is not there or holds something else.

    Raises:
        NotAvailable: other users can write to the folder, or this one cannot.
    """
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _refuse_shared(path.parent)
        if path.is_symlink() or not path.is_file() or path.read_bytes() != source.encode():
            with tempfile.NamedTemporaryFile("wb", dir=path.parent, suffix=".tmp", delete=False) as file:
                try:
                    file.write(source.encode())
                    file.flush()
                    os.replace(file.name, path)
                except OSError:
                    os.unlink(file.name)
                    raise
    except OSError as error:
        raise NotAvailable(
            f"generated kernels cannot be written to {path.parent} ({error}); FLEXSP_CODE_DIR or code_dir names "
            "another folder"
        ) from error


def _refuse_shared(folder: Path) -> None:
    """NotAvailable where users other than this one and root can write.

    A group may write if it is the one that this process makes files for: with user private groups, and umask 002, that
    is nobody else. Root may use what belongs to others, as in containers with a user's folder mounted.
    """
    found, user = folder.stat(), os.getuid()
    others = bool(found.st_mode & stat.S_IWOTH)
    group = bool(found.st_mode & stat.S_IWGRP) and found.st_gid not in (0, os.getegid())
    owner = user != 0 and found.st_uid not in (0, user)
    if others or group or owner:
        who = "every user" if others else f"the group {found.st_gid}" if group else f"the user {found.st_uid}"
        raise NotAvailable(
            f"generated kernels are not kept in {folder}: {who} can write to it (mode {stat.S_IMODE(found.st_mode):o}, "
            f"owner {found.st_uid}; this is user {user}). Take that away (chmod go-w), or name another folder by "
            "FLEXSP_CODE_DIR or code_dir"
        )


def _run(path: Path, source: str) -> ModuleType:
    """The module of a source that is said to be in `path`; no file is read, not by Triton either: it asks linecache."""
    module = ModuleType(f"flexsp_generated_{path.stem}")
    module.__file__ = str(path)
    linecache.cache[str(path)] = len(source), None, source.splitlines(keepends=True), str(path)
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module
