"""Stage 3b: the list of chunkwise kernels, with what each writes and reads.

Before the walks: `prepare0`, `prepare1`, ... around the intrinsics. After them: `adjoint0`, ... around the gradients of
intrinsics, then `grads` in parts, one for each gradient of two axes, so that a part holds few tiles, and
`reduce_gate_grads`, which makes the gradients of one axis from sums that the parts leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flexsp.compiler.frontend.meta import OURS
from flexsp.compiler.frontend.trace import needed_by
from flexsp.compiler.graphs.differentiate import ChunkTensor, Intrinsic, Step, copied
from flexsp.compiler.graphs.rewrite import dims
from flexsp.compiler.graphs.values import is_state

__all__ = ["Stage", "for_users", "make_stages", "split_gradients"]


@dataclass(frozen=True)
class Stage:
    """Chunkwise work before the walks or before `grads`: a kernel that writes kept values, then intrinsics."""

    kind: str
    backward: bool
    writes: tuple[str, ...]
    given: tuple[str, ...]
    intrinsics: tuple[Intrinsic, ...]

    @property
    def leaves(self) -> list[str]:
        return [*self.writes, *(name for x in self.intrinsics for name in x.results)]


def make_stages(step: Step) -> list[Stage]:
    """Stages in the order in which they run."""
    stages: list[Stage] = []
    available: list[str] = []
    made = {n for x in step.intrinsics for n in (*x.args, *x.results)}
    cached = [x for x in step.kept.values() if x.name not in made and not x.of_gates]
    levels = _grad_levels(step)
    for backward in (False, True):
        mine = [x for x in step.intrinsics if x.backward == backward]
        of_cached = {x.name: levels[x.name] for x in cached if x.role == "gradient"} if backward else {}
        top = max([x.level for x in mine], default=0)
        for level in range(max([top, *(n + 1 for n in of_cached.values())]) if backward else top + 1):
            now = tuple(x for x in mine if x.level == level + 1)
            wanted = [name for x in now for name in x.args if name in step.kept and name not in available]
            if not backward and level == 0:
                wanted += [x.name for x in step.kept.values() if x.of_gates]
            if not backward and level == top:
                wanted += [x.name for x in cached if x.role != "gradient"]
            wanted += [name for name, n in of_cached.items() if n == level]
            writes = tuple(dict.fromkeys(wanted))
            if writes or now:
                kind = f"{'adjoint' if backward else 'prepare'}{level}"
                stages.append(Stage(kind, backward, writes, tuple(available), now))
            available += [*writes, *(name for x in now for name in x.results)]
    return stages


def for_users(step: Step, names: Iterable[str]) -> str:
    """Values in the words of users: inputs and cached results by name, others by the line that computes them."""
    named = _named(step)
    known = []
    for name in names:
        node = named.get(f"keep_{name}")
        line = None if node is None else node.meta.get("line")
        computed = f"a value computed at {line}" if line else "a value that flexsp computes"
        known.append(computed if OURS.match(name) else repr(name))
    return ", ".join(dict.fromkeys(known))


def _grad_levels(step: Step) -> dict[str, int]:
    """The number of gradients of intrinsics, one after the other, that each saved value needs."""
    named = _named(step)
    results = {named[f"keep_{name}"] for x in step.intrinsics if x.backward for name in x.results}
    levels: dict[Any, int] = {}
    for node in step.graph.nodes:
        levels[node] = max([levels[x] for x in node.all_input_nodes], default=0) + (node in results)
    return {name: levels[named[f"keep_{name}"]] for name in step.kept}


def split_gradients(
    step: Step, outputs: Sequence[str], given: Iterable[str]
) -> tuple[Step, list[list[str]], list[str], list[str]]:
    """(the step with sums as outputs, outputs of each part, outputs of `reduce_gate_grads`, names of the sums)."""
    named = _named(step)
    large = [name for name in outputs if len(dims(named[name])) == 2]
    small = [name for name in outputs if name not in large]
    if len(large) < 2:
        return step, [list(outputs)], [], []
    stop = {named[f"keep_{name}"] for name in given}
    cuts = _reductions([named[name] for name in small], stop)
    sums = {f"sum{i}": node for i, node in enumerate(cuts)}
    graph, copies, results = copied(step.graph)
    graph.output([*results, *(copies[node] for node in sums.values())])
    parts = [[name] for name in large]
    needs = [needed_by([named[name]], stop) for name in large]
    for name, node in sums.items():
        mine = needed_by([node], stop)
        best = min(range(len(parts)), key=lambda i: _cost(mine - needs[i]))
        parts[best].append(f"keep_{name}")
        needs[best] |= mine
    kept = {name: ChunkTensor(name, dims(node), "sum", len(dims(node)) < 2) for name, node in sums.items()}
    new = replace(
        step, graph=graph, outputs=(*step.outputs, *(f"keep_{name}" for name in sums)), kept=step.kept | kept
    )
    return new, parts, small, list(sums)


def _named(step: Step) -> dict[str, Any]:
    end: Any = next(node for node in step.graph.nodes if node.op == "output")
    return dict(zip(step.outputs, end.args[0], strict=True))


def _cost(nodes: set[Any]) -> int:
    """A rough estimate of the work of computing these nodes too: products and large loads."""
    return sum(100 if "mm" in node.name or is_state(node.name) else len(dims(node)) for node in nodes)


def _reductions(nodes: Iterable[Any], stop: set[Any]) -> list[Any]:
    """The nodes at which values of two axes become values of one axis or none."""
    found: dict[Any, None] = {}
    seen: set[Any] = set()
    waiting = list(nodes)
    while waiting:
        at = waiting.pop()
        if at in seen or at in stop or at.op == "placeholder":
            continue
        seen.add(at)
        if any(len(dims(x)) == 2 for x in at.all_input_nodes):
            found[at] = None
        else:
            waiting += at.all_input_nodes
    return list(found)
