"""Stage 3: one chunk's step and its adjoint, derived from the three functions, as one graph of aten operators.

The step maps the chunk's inputs and the state that enters it to the outputs and the state that leaves it. Sizes are
symbols, so one graph serves every chunk length and head size. Kernels are made of parts of it (`cut`).
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node, traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from flexsp.compiler.frontend import primitives
from flexsp.compiler.frontend.check import SECOND_MATRIX
from flexsp.compiler.frontend.meta import CHUNK_STATE, STATE, ConstExpr, Size
from flexsp.compiler.frontend.program import Program
from flexsp.compiler.frontend.trace import Traced, location, named, needed_by
from flexsp.compiler.graphs import intrinsics
from flexsp.compiler.graphs.inverses import shorten_adjoints
from flexsp.compiler.graphs.rewrite import DIMS, cheapen, dims, row_scaled, simplify
from flexsp.compiler.graphs.values import NotEmittable, is_state

__all__ = ["Intrinsic", "Step", "copied", "cut", "differentiate", "state_names"]

aten = torch.ops.aten
_CHUNK, _LEAST, _GAP = 11, 100, 90
_LENGTHS = sorted({2, 3, *(n + i for n in (8, 16, 32, 64) for i in (-1, 0, 1)), 127, 128})
_DECOMPOSED = [
    aten.sigmoid_backward, aten.tanh_backward, aten.silu, aten.silu_backward, aten.softplus, aten.softplus_backward,
    aten.elu, aten.elu_backward, aten.leaky_relu, aten.leaky_relu_backward, aten.gelu, aten.gelu_backward,
    aten.log_sigmoid_forward, aten.log_sigmoid_backward, aten._softmax, aten._softmax_backward_data,
    aten._log_softmax, aten._log_softmax_backward_data, aten.logsumexp, aten.linalg_vector_norm, aten.mv, aten.dot,
    aten.addcmul,
]  # fmt: skip


def _between(x: torch.Tensor, min: Any = None, max: Any = None) -> torch.Tensor:
    """`torch.clamp` with tensors as bounds."""
    x = x if min is None else torch.maximum(x, min)
    return x if max is None else torch.minimum(x, max)


def _mean(x: torch.Tensor, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
    axes = list(dim or range(x.dim()))
    return x.sum(axes, keepdim) / math.prod(x.shape[axis] for axis in axes)


_OWN = {aten.clamp.Tensor: _between, aten.mean.dim: _mean, aten.mean.default: _mean}


@dataclass(frozen=True)
class Intrinsic:
    """A launch of an intrinsic kernel: its `kind`, the tokens or saved values that it reads, and its results.

    `level` is 1 if it needs no other intrinsic of its direction, 2 if it needs one of level 1, and so on.
    `exact_repeats` is that of `unit_lower_inverse`.
    """

    kind: str
    args: tuple[str, ...]
    results: tuple[str, ...]
    level: int
    exact_repeats: bool = False

    @property
    def backward(self) -> bool:
        return self.kind == "scores_grad"


@dataclass(frozen=True)
class ChunkTensor:
    """A value of every chunk that one kernel stores and others load.

    Attributes:
        name: its name in the code of kernels.
        dims: names of its sizes. "C" are the tokens of a chunk, the first axis of a matrix that has them.
        role: one of
            "cached": a value that chunk_mode caches;
            "gradient": the gradient of a cached value;
            "gates": running sums of gates over the chunk;
            "gated": an operand of a product, made with gates of two axes;
            "operand": another operand of a product in a dense walk;
            "argument", "result": of an intrinsic;
            "exponents": the argument of scores that is made of running gates;
            "sum": a sum that `reduce_gate_grads` reads.
        wide: whether it is fp32 for all inputs; else it has their dtype.
    """

    name: str
    dims: tuple[str, ...]
    role: str
    wide: bool

    @property
    def running(self) -> bool:
        """Whether rows past a chunk's tokens repeat the last one, and are read; else they are zero."""
        return self.role == "gates"

    @property
    def past_the_end(self) -> bool:
        """Whether rows past a chunk's tokens are stored as computed. Scores subtract these sums from each other: a 0
        among them would act as a gate above 1."""
        return self.role in ("gates", "exponents")

    @property
    def of_gates(self) -> bool:
        """Whether it depends on gates alone, so that the first kernel can store it."""
        return self.role in ("gates", "gated")


@dataclass(frozen=True)
class Step:
    """One chunk's step and its adjoint, as a graph.

    Placeholders are the inputs by name, "S", "do" and "dS"; "S__x" is part x of a state. Outputs are "o", "S" (the
    state that leaves), "A" (its derivative by the entering state, for elementwise transitions), "shift" (a of
    max(S + a, F)), "d_NAME" for each input, "d_S", and "keep_NAME" for each intrinsic and each value that chunk_mode
    caches.
    `condition`: the sizes that the graph is right for; empty if for all.
    """

    graph: Graph
    tokens: tuple[str, ...]
    params: tuple[str, ...]
    outputs: tuple[str, ...]
    kept: dict[str, ChunkTensor]
    intrinsics: tuple[Intrinsic, ...]
    condition: str


class _Sizes:
    """The symbols of a trace's sizes, by name, and the sizes at which it is traced.

    The sizes are different primes, and none is `given` as a number, so that a number in the trace names one size. They
    are as small as that allows, since `unbind` makes a node of every row.
    """

    def __init__(self, given: Iterable[float] = ()) -> None:
        self.given = set(given)
        self.hints: dict[str, int] = {}
        self.symbols: dict[Any, str] = {}
        self.inputs: list[tuple[str, ...]] = []
        self.chunk = self._new("C", _CHUNK)
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)
        self.mode.cache_enabled = False  # few operators find theirs, and the others would be worked out twice

    def of(self, size: Size) -> int:
        if not isinstance(size, ConstExpr):
            return int(size) if isinstance(size, int) else self.hints[size]
        return self.hints.get(size.name) or self._new(size.name)

    def _new(self, name: str, least: int = _LEAST) -> int:
        start = max(least, max(self.hints.values(), default=-_GAP) + _GAP)
        free = (n for n in itertools.count(start) if n not in self.given and all(n % d for d in range(2, n)))
        self.hints[name] = next(free)
        return self.hints[name]

    def tensor(self, sizes: Sequence[int]) -> torch.Tensor:
        known = {n: name for name, n in self.hints.items()}
        dynamic = [DimDynamic.DYNAMIC if n in known else DimDynamic.STATIC for n in sizes]
        made = self.mode.from_tensor(
            torch.empty(list(sizes)), symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic)
        )
        shape: Sequence[Any] = made.shape
        self.symbols |= {x.node.expr: known[n] for n, x in zip(sizes, shape, strict=True) if n in known}
        self.inputs.append(tuple(known.get(n, str(n)) for n in sizes))
        return made

    def name(self, size: Any) -> str:
        """The name of a size that is a symbol; a number as text."""
        if not isinstance(size, torch.SymInt):
            return str(size)
        return self.symbols.get(size.node.expr, str(size.node.hint))

    def condition(self, choices: Mapping[str, Iterable[int]]) -> str:
        """Where the trace is right for some sizes only, such as that of x[:16] for fewer than 16 tokens: for which.

        Sizes of 1 are left out: torch looks whether they are, and goes on in the same way.
        """
        values = {name: [max(2, n) for n in given] for name, given in choices.items()} | {"C": _LENGTHS}
        for guard in self.env.guards:
            named = {x: self.symbols.get(x, str(x)) for x in guard.expr.free_symbols}
            if not self.hints.keys() >= {*named.values()}:
                return f"{guard.expr}, where not all are sizes of inputs"
            names = sorted(set(named.values()))
            for of in itertools.product(*(values.get(name, [self.hints[name]]) for name in names)):
                at = dict(zip(names, of, strict=True))
                if not guard.expr.subs({x: at[name] for x, name in named.items()}):
                    text = guard.expr.subs({x: sympy.Symbol(name) for x, name in named.items()})
                    return f"{text}, and not with {', '.join(f'{name} = {n}' for name, n in at.items())}"
        return ""


def _with_intrinsics(traced: Traced) -> GraphModule:
    module = copy.deepcopy(traced.module)
    swap: dict[Any, Any] = {
        primitives.unit_lower_inverse: intrinsics.unit_lower_inverse,
        primitives.decayed_scores: intrinsics.decayed_scores,
        primitives.decayed_sums: intrinsics.decayed_sums,
    }
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.target = swap.get(node.target, node.target)
    _reassociate(module.graph)
    module.recompile()
    return module


def state_names(program: Program) -> list[str]:
    """Placeholders of the state's parts."""
    return ["S", *(f"S__{part.name}" for part in program.parts)]


def _numbered(name: str, parts: Sequence[Any]) -> dict[str, Any]:
    return {f"{name}__{i}" if i else name: x for i, x in enumerate(parts)}


def _apart(module: GraphModule, parts: int) -> GraphModule:
    """The function with a state's parts as arguments, in place of the matrix that stores them."""
    if parts == 1:
        return module
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.target in (STATE, CHUNK_STATE):
            with graph.inserting_before(node):
                new = [graph.placeholder(name) for name in _numbered(node.target, range(parts))]
            for user in list(node.users):
                user.replace_all_uses_with(new[user.args[1]])
                graph.erase_node(user)
            graph.erase_node(node)
        elif node.target is primitives.joined:
            end = next(iter(node.users))
            end.args = ((*node.args, *end.args[0][1:]),)
            graph.erase_node(node)
    graph.lint()
    module.recompile()
    return module


class _Lines(Interpreter):
    """Runs one of the functions under make_fx, so that its nodes and those of its derivative have the user's line."""

    def run_node(self, n: Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        n.stack_trace = line = location(n)  # the interpreter hands it to the nodes that are made meanwhile
        result = super().run_node(n)
        for x in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(x, torch.Tensor) and x.grad_fn is not None:
                x.grad_fn.register_prehook(lambda grads: traceback.set_stack_trace([line]))
        return result


def _is(node: Any, *names: str) -> bool:
    name = getattr(getattr(node, "target", None), "__name__", None) or getattr(node, "target", None)
    return isinstance(node, Node) and name in names


def _reassociate(graph: Graph) -> None:
    """(I - X Y) S -> S - X (Y S): 2 C K V products for K K (C + V), and no K x K matrix."""
    for node in list(graph.nodes):
        if not _is(node, "matmul", "mm", "matmul_out_fp32") or len(node.args) != 2 or not _is(node.args[0], "sub"):
            continue
        difference, right = node.args[0], node.args[1]
        if difference.kwargs:  # alpha
            continue
        eye, product = difference.args
        if not (isinstance(eye, Node) and eye.target is primitives.identity and _is(product, "matmul", "mm")):
            continue
        with graph.inserting_before(node):
            inner = graph.call_function(torch.matmul, (product.args[1], right))
            outer = graph.call_function(torch.matmul, (product.args[0], inner))
            new = graph.call_function(torch.sub, (right, outer))
        for made in (inner, outer, new):
            made.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def differentiate(program: Program) -> Step:
    """The step of `program` with its adjoint."""
    meta = program.meta
    shapes_given = [x.shape for x in (*meta.tokens.values(), *meta.params.values(), meta.state)]
    sizes = _Sizes({n for shape in shapes_given for n in shape if isinstance(n, int)} | {*meta.numbers.values()})
    state = [sizes.of(s) for s in meta.state_sizes]
    of_parts = [[sizes.of(ConstExpr(s, 1)) for s in part.sizes] for part in program.parts]
    states = state_names(program)
    shapes = {name: [sizes.chunk, *(sizes.of(s) for s in what.shape[2:])] for name, what in meta.tokens.items()}
    shapes |= {name: [sizes.of(s) for s in what.shape[1:]] for name, what in meta.params.items()}
    names = [*shapes, *states]
    inputs = [sizes.tensor(shape) for shape in (*shapes.values(), state, *of_parts)]
    width = [sizes.of(s) for s in (program.value_sizes if not isinstance(program.value_sizes[0], int) else state[-1:])]
    cotangents = [sizes.tensor([sizes.chunk, width[-1]]), *(sizes.tensor(shape) for shape in (state, *of_parts))]
    phases = [_with_intrinsics(x) for x in (program.chunk, program.decay, program.merge)]
    chunk, decay, merge = (_apart(module, len(states)) for module in phases)
    shift = _with_intrinsics(program.linear) if program.transition == "max-plus" and program.linear else None
    outputs: list[str] = []
    elementwise = program.transition in ("none", "scalar", "vector", "elementwise", "max-plus")

    def run(module: GraphModule, values: Mapping[str, Any], n: int) -> tuple[Any, Any]:
        results = _Lines(module).run(*(values[x.target] for x in module.graph.nodes if x.op == "placeholder"))
        return results[:n], results[n:]

    def joint(given: list[torch.Tensor], do: torch.Tensor, *dS: torch.Tensor) -> list[torch.Tensor]:
        values: dict[str, Any] = dict(zip(names, [x.detach().requires_grad_() for x in given], strict=True))
        leaves = list(values.values())
        S = [values.pop(name) for name in states]
        values.update(meta.numbers)
        F, cached = run(chunk, values, len(S))
        values.update(zip(program.chunk.cached, cached, strict=True))
        S_new, _ = run(decay, values | _numbered(STATE, S) | _numbered(CHUNK_STATE, F), len(S))
        (o,), _ = run(merge, values | _numbered(CHUNK_STATE, S), 1)
        found = {"o": o, **dict(zip(states, S_new, strict=True))}
        for name, old, new in zip(states, S, S_new, strict=True) if elementwise else ():
            ones = torch.ones_like(old)
            (grad,) = torch.autograd.grad(new, old, ones, retain_graph=True, materialize_grads=True)
            found[f"A{name[1:]}"] = grad
        if shift is not None:
            (found["shift"],), _ = run(shift, values | {STATE: torch.zeros_like(S[0]), CHUNK_STATE: F[0]}, 1)
        ends, cotangents = [o, *S_new], [do, *dS]
        grads = torch.autograd.grad(ends, [*leaves, *cached], cotangents, allow_unused=True, materialize_grads=True)
        found |= {f"d_{name}": x for name, x in zip(names, grads, strict=False)}
        found |= {f"keep_{name}": x for name, x in zip(program.chunk.cached, cached, strict=True)}
        found |= {f"keep_grad_{name}": x for name, x in zip(program.chunk.cached, grads[len(names) :], strict=True)}
        outputs[:] = list(found)
        return list(found.values())

    with torch.inference_mode(False), torch.enable_grad(), traceback.preserve_node_meta():
        table: Any = get_decompositions(_DECOMPOSED) | _OWN
        try:
            graph = make_fx(joint, table, tracing_mode="symbolic")(inputs, *cotangents).graph
        except RuntimeError as error:  # the functions have run before, with sizes of the program
            told = str(error).strip().splitlines()[0]
            if any(named(x) == "cat" for of in (program.chunk, program.decay) for x in of.graph.nodes):
                told += SECOND_MATRIX
            raise NotEmittable(f"the functions run with some sizes only, kernels are made for all: {told}") from error
    _label(graph, [*names, "do", *(f"d{name}" for name in states)], sizes)
    for node in graph.nodes:
        node.meta["param"] = node.op == "placeholder" and node.name in meta.params and len(dims(node)) == 2
    _out_of_place(graph)
    simplify(graph)
    shorten_adjoints(graph)
    keeper = _Keeper(graph, outputs, program.transition == "dense")
    keeper.run()
    graph.lint()
    return Step(
        graph, tuple(meta.tokens), tuple(meta.params), tuple(outputs), keeper.kept(), tuple(keeper.intrinsics),
        sizes.condition(meta.sizes()),
    )  # fmt: skip


def _label(graph: Graph, names: Sequence[str], sizes: _Sizes) -> None:
    """Names the placeholders; gives every node its line and the names of its sizes."""
    for node in graph.nodes:
        value = node.meta.get("val")
        node.meta["line"] = node.stack_trace
        if isinstance(value, torch.Tensor):
            node.meta[DIMS] = tuple(sizes.name(n) for n in value.shape)
        elif isinstance(value, torch.SymInt):
            node.meta["size"] = sizes.name(value)
    for node in graph.nodes:
        if node.name in names:
            node.name = f"{node.name}_of_graph"
    for node, name, of in zip(list(graph.nodes), names, sizes.inputs, strict=False):
        node.name = node.target = name
        node.meta[DIMS] = of  # also where the trace holds for one size only, which says so later


def _out_of_place(graph: Graph) -> None:
    """Replaces in-place operators of derivatives, such as where(...).masked_fill_(...), by out-of-place ones."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        name, _, overload = str(getattr(node.target, "__name__", "")).partition(".")
        if node.op != "call_function" or not name.endswith("_") or name.endswith("__"):
            continue
        node.target = getattr(getattr(aten, name[:-1]), overload)
        node.args[0].replace_all_uses_with(node, delete_user_cb=lambda user, at=node: place[user] > place[at])


class _Keeper:
    """Decides what is computed once, before the walks, and read from memory: kept values, by name.

    These are running sums over a chunk ("gates": a walk would scan again and again; but with a vector state, where they
    are as large as all that is read, they are summed anew), the arguments and results of intrinsics, and where there
    are any, what chunk_mode caches if it takes a matrix product. A dense walk goes over all chunks one after the other,
    so what multiplies the state there is kept too: its steps are products and no more. And operands of a walk's
    products that are made with gates of two axes ("gated"): they take less memory than the gates.
    """

    def __init__(self, graph: Graph, outputs: list[str], dense: bool) -> None:
        self.graph, self.outputs, self.dense = graph, outputs, dense
        self.end = next(node for node in graph.nodes if node.op == "output")
        self.named: dict[str, Any] = dict(zip(outputs, self.end.args[0], strict=True))
        self.found: dict[str, Any] = {}
        self.roles: dict[str, str] = {}
        self.wide: set[str] = set()
        self.intrinsics: list[Intrinsic] = []
        self.levels: dict[Any, int] = {}
        self.grad_levels: dict[Any, int] = {}

    def kept(self) -> dict[str, ChunkTensor]:
        """What `run` found."""
        return {
            name: ChunkTensor(name, dims(node), self.roles[name], name in self.wide or len(dims(node)) < 2)
            for name, node in self.found.items()
        }

    def _keep(self, name: str, node: Any, role: str, wide: bool = False) -> None:
        self.found[name], self.roles[name] = node, role
        if wide:
            self.wide.add(name)

    def run(self) -> None:
        forward = needed_by([node for name, node in self.named.items() if name == "o" or is_state(name)])
        matrix = len(dims(self.named["S"])) == 2
        for node in self.graph.nodes if matrix else ():
            running = node.target is aten.cumsum.default and node.args[1] == 0
            if node in forward and running and (len(dims(node)) < 2 or dims(node)[0] == "C") and not _heavy(node):
                self._keep(f"gates_{node.name}", node, "gates", wide=True)
        for node in list(self.graph.nodes):
            for levels in (self.levels, self.grad_levels):
                levels[node] = max([levels[x] for x in node.all_input_nodes], default=0)
            if node.target in _KINDS:
                self._intrinsic(node)
        if self.intrinsics:
            for name, node in self.named.items():
                if name.startswith("keep_") and _heavy(node) and node not in self.found.values():
                    name = name.removeprefix("keep_")
                    self._keep(name, node, "gradient" if name.startswith("grad_") else "cached")
        if self.dense:
            self._operands(forward)
        self._gated(forward)
        self._turn()
        new = {name: node for name, node in self.found.items() if f"keep_{name}" not in self.outputs}
        self.end.args = ([*self.end.args[0], *new.values()],)
        self.outputs += [f"keep_{name}" for name in new]
        for name, node in self.found.items():
            for user in self.graph.nodes if self.roles[name] == "gates" else ():
                if user.target is aten.sum.dim_IntList and user.args[:2] == (node.args[0], [0]):
                    user.meta["last"] = name

    def _turn(self) -> None:
        """Saves the transpose of a tile whose columns are tokens, or whose rows are columns of the state.

        A program may work on some of the state's columns, and loads rows. The reader transposes the tile back.
        """
        last = dims(self.named["S"])[-1]
        for name, node in self.found.items():
            if len(dims(node)) != 2 or dims(node)[0] == "C" or (dims(node)[1] != "C" and dims(node)[0] != last):
                continue
            turned = node.args[0]
            if node.target is not aten.t.default:
                with self.graph.inserting_after(node):
                    turned = self.graph.call_function(aten.t.default, (node,))
                turned.meta = node.meta | {"val": node.meta["val"].mT, DIMS: dims(node)[::-1]}
                with self.graph.inserting_after(turned):
                    back = self.graph.call_function(aten.t.default, (turned,))
                back.meta = dict(node.meta)
                node.replace_all_uses_with(back, delete_user_cb=lambda user, of=turned: user is not of)
            self.found[name] = turned
            kept = {f"keep_{name}": turned}
            self.end.args = ([kept.get(of, x) for of, x in zip(self.outputs, self.end.args[0], strict=True)],)

    def _operands(self, forward: set[Any]) -> None:
        """Saves the operands of products with the state that depend on the chunk alone."""
        moving: set[Any] = set()
        for node in self.graph.nodes:
            if node.name == "do" or is_state(node.name) or any(x in moving for x in node.all_input_nodes):
                moving.add(node)
        for node in self.graph.nodes:
            if node in forward and node in moving and node.target is aten.mm.default:
                for side, x in enumerate(node.args):
                    turned = x.target is aten.t.default
                    x = x.args[0] if turned else x
                    leaves = side == 0 and not turned and row_scaled(x)  # a factor of rows leaves the product
                    known = x in moving or x.op == "placeholder" or x in self.found.values()
                    if not known and not leaves:
                        self._keep(f"operand{len(self.found)}", x, "operand")

    def _gated(self, forward: set[Any]) -> None:
        """Saves operands of products in walks that depend on gates of two axes and on no product."""
        wide = {node for name, node in self.found.items() if self.roles[name] == "gates" and len(dims(node)) == 2}
        for node in self.graph.nodes:
            if node in forward and node.target is aten.mm.default:
                for x in node.args:
                    x = x.args[0] if x.target is aten.t.default else x
                    known = x.op == "placeholder" or x in self.found.values()
                    if not known and not _heavy(x) and dims(x)[:1] == ("C",) and wide & needed_by([x]):
                        self._keep(f"gated_{len(self.found)}", x, "gated")

    def _intrinsic(self, node: Any) -> None:
        kind, n = _KINDS[node.target], len(self.intrinsics)
        last = len(node.args) - 1  # the matrix to invert, or the running gates of scores, which stay in float32
        roles = ["argument"] * last + ["argument" if kind == "inverse" else "exponents"]
        args = tuple(
            self._name(x, f"f32_arg{n}" if i == last else f"arg{n}_{i}", i == last, role)
            for i, (x, role) in enumerate(zip(node.args, roles, strict=True))
        )
        if kind == "scores_grad":
            parts = {f"f32_grad{n}_{user.args[1]}": user for user in node.users}
            for name, user in parts.items():
                self._keep(name, user, "result", wide=True)
            results, levels = tuple(parts), self.grad_levels
        else:
            results, levels = (f"{kind}{n}",), self.levels
            self._keep(results[0], node, "result")
        levels[node] += 1
        self.intrinsics.append(Intrinsic(kind, args, results, levels[node], node.kwargs.get("exact_repeats", False)))

    def _name(self, x: Any, otherwise: str, wide: bool, role: str) -> str:
        if x.op == "placeholder":
            return x.name
        known = next((name for name, node in self.found.items() if node is x), None)
        if known is None:
            self._keep(otherwise, x, role, wide)
        return known or otherwise


_KINDS = {
    intrinsics.unit_lower_inverse: "inverse",
    torch.ops.flexsp.vector_scores.default: "scores",
    torch.ops.flexsp.vector_scores_grad.default: "scores_grad",
}


def _heavy(node: Any) -> bool:
    """Whether this value depends on a matrix product, an intrinsic or the state."""
    return any(
        at.target is aten.mm.default or at.target in _KINDS or is_state(at.name) for at in needed_by([node])
    )


def copied(graph: Graph) -> tuple[Graph, dict[Node, Node], list[Any]]:
    """A copy of the graph without its output; its nodes by those of the graph; what the output has."""
    new, copies = Graph(), dict[Node, Node]()
    results: Any = new.graph_copy(graph, copies)
    for node, copy_of_it in copies.items():
        if node.op == "placeholder":  # graphs write names their own way, such as input_1 for an input named "input"
            copy_of_it.name = copy_of_it.target = node.name
    return new, copies, list(results)


def cut(
    step: Step, outputs: Iterable[str], given: Iterable[str] = (), join: bool = False
) -> tuple[Graph, Mapping[str, Any]]:
    """The part of the graph that computes `outputs`, with kept values `given` read instead of computed.

    `join`: products with a common operand become one.
    """
    graph, copies, results = copied(step.graph)
    named = dict(zip(step.outputs, results, strict=True))
    for name in given:
        node = named[f"keep_{name}"]
        if node.op == "placeholder":
            continue
        with graph.inserting_before(next(iter(graph.nodes))):
            new = graph.placeholder(name)
        for other in graph.nodes:
            if other.name == name and other is not new:
                other.name = f"{new.name}_other"
        new.name = name  # graphs write names their own way, and another node may have had it
        new.meta = dict(node.meta) | {"kept": name}
        node.replace_all_uses_with(new)
        named = {key: new if value is node else value for key, value in named.items()}
    outputs = list(outputs)
    end = graph.output([named[name] for name in outputs])
    _remove_dead(graph)
    cheapen(graph, join)
    _remove_dead(graph)
    return graph, dict(zip(outputs, end.args[0], strict=True))


def _remove_dead(graph: Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op != "output" and not node.users:
            graph.erase_node(node)
