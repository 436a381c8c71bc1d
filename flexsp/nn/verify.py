"""verify: a module run on a batch cut over ranks and on the whole batch, submodule by submodule."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flexsp.comm.collectives import sum_over_ranks
from flexsp.comm.group import SequenceParallel, sequence_parallel
from flexsp.exceptions import NotExact, check_dense
from flexsp.nn.wrapper import SequenceParallelLA, unwrap

__all__ = ["Verification", "verify"]

_NOISE = 32  # how much further than a rounding of every input and parameter carries a value, cutting may carry it
_ROUNDINGS = 64


@dataclass(frozen=True)
class Verification:
    """What `flexsp.verify` found; ``str()`` of it is a sentence.

    ``ok``: no value and no gradient differs. Else ``submodule`` is the path of the first that makes a difference ("" is
    the module itself), ``kind`` its class, ``what`` "output" or "gradient", ``detail`` which, ``error`` how far values
    are off, in units of their root mean square, ``bound`` how far rounding alone may carry them. ``compared`` counts
    the tensors that were compared, ``lengths`` are the shards' tokens.
    """

    ok: bool
    lengths: tuple[int, ...]
    compared: int
    submodule: str | None = None
    kind: str = ""
    what: str = ""
    detail: str = ""
    error: float = 0.0
    bound: float = 0.0

    def __str__(self) -> str:
        cut = f"over {len(self.lengths)} ranks with {', '.join(map(str, self.lengths))} tokens"
        if self.ok:
            return f"exact {cut}: {self.compared} outputs and gradients of submodules and parameters agree"
        where = f"submodule {self.submodule!r} ({self.kind})" if self.submodule else f"the module itself ({self.kind})"
        return (
            f"not exact {cut}: {where} is the first whose {self.what} differs from that of the whole sequence "
            f"({self.detail}: off by {self.error:.2g} of the root mean square, rounding explains {self.bound:.2g})"
        )


def verify(
    module: nn.Module,
    sp: SequenceParallel,
    x: Tensor,
    *,
    dim: int = 1,
    dtype: torch.dtype | None = torch.float64,
    raise_on_error: bool = True,
    **inputs: Any,
) -> Verification:
    """Run ``module(x, **inputs)`` on this rank alone and cut over ``sp``; say which submodule first makes a difference.

    Values are compared at every entry into a submodule and every return from one, gradients at the same places and for
    every parameter. So the first difference names the submodule whose own code makes it, not those that suffer from it.
    Works on copies: ``module``, wrapped in `SequenceParallelLA` or not, refused by it or not, stays as it is. Use it
    before DistributedDataParallel, fully_shard and torch.compile. Collective over ``sp``; every rank needs memory for
    the whole batch.

    Args:
        module: has the same parameters on all ranks and draws no random numbers (``module.eval()`` if it has dropout).
        x: the whole batch, the same on every rank, tokens along ``dim``. It is cut by ``sp.set_lengths`` where that was
            called for as many tokens, else by ``sp.partition``. Uneven lengths find more.
        dtype: what floating parameters and inputs are converted to first. In float64 rounding hides nothing. None, or a
            dtype, for modules that do not run in it.
        raise_on_error: raise instead of returning a Verification that is not ok.
        inputs: further arguments of ``module``. Tensors of two or more axes with as many tokens along ``dim`` are cut
            too; others, such as global ``cu_seqlens``, are passed as they are.

    Raises:
        NotExact: something differs; its ``report`` is the Verification.
        ValueError: bad arguments, or what cannot be judged: random numbers, other inputs or parameters on some rank.

    Example:
        >>> flexsp.verify(model, sp, torch.randint(256, (1, 300)))
    """
    _check_arguments(module, sp, x, dim)
    total, known = x.shape[dim], sp.lengths
    lengths = known if known is not None and sum(known) == total else sp.partition(total)
    shard = _Shard(sum(lengths[: sp.rank]), lengths[sp.rank], total)
    whole = unwrap(copy.deepcopy(module))
    if dtype is not None:
        whole = whole.to(dtype=dtype)
    x, inputs = _converted(x, dtype), {name: _converted(value, dtype) for name, value in inputs.items()}
    _same_everywhere(whole, sp, {"x": x, **inputs})
    with sequence_parallel(None):
        want = _run_whole(whole, x, inputs, dtype)
        _refuse_random(whole, x, inputs, want)
        nudged = {name: _nudged(value) for name, value in inputs.items()}
        off = _run_whole(_with_nudged_parameters(whole), _nudged(x), nudged, dtype)
    cut = SequenceParallelLA(copy.deepcopy(whole), sp, allow=("",))
    sp.set_lengths(lengths)
    try:
        got = _Record(cut)
        mine = {name: _cut(value, dim, shard) for name, value in inputs.items()}
        got.forward(_cut(x, dim, shard), mine)
        judge = _Judge(want, got, off, shard, sp)
        got.backward(judge.cotangents())
        report = judge.report(tuple(lengths))
    finally:
        sp.set_lengths(known)
    if raise_on_error and not report.ok:
        raise NotExact(report)
    return report


# ----------------------------------------------------------------------------------------------- recording a run


class _Key(NamedTuple):
    """A tensor that enters ("in") or leaves ("out") the n-th call of a submodule."""

    path: str
    n: int
    side: str
    leaf: str


class _Record:
    """One run of a module: values in the order in which they are made, their gradients in the order of arrival."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.values: dict[_Key, Tensor] = {}
        self.grads: dict[_Key, Tensor] = {}
        self.callers: dict[tuple[str, int], str] = {}
        self.outputs: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._running: list[tuple[str, int]] = []
        self._live = False

    def forward(self, x: Tensor, inputs: Mapping[str, Any]) -> None:
        handles = []
        for path, submodule in self.module.named_modules():
            handles.append(submodule.register_forward_pre_hook(self._entering(path), with_kwargs=True))
            handles.append(submodule.register_forward_hook(self._leaving))
        self._live = True
        leaf = x.detach().clone()
        try:
            self.module(leaf.requires_grad_(leaf.is_floating_point()), **inputs)
        finally:
            self._live = False
            for handle in handles:
                handle.remove()

    def backward(self, cotangents: Mapping[str, Tensor]) -> None:
        pairs = [(y, cotangents[name]) for name, y in self.outputs.items() if y.requires_grad and name in cotangents]
        if pairs:
            torch.autograd.backward([y for y, _ in pairs], [dy for _, dy in pairs])
        self.outputs = {}

    def _entering(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not self._live:
                return None
            n = self._counts.get(path, 0)
            self._counts[path] = n + 1
            self.callers[path, n] = self._running[-1][0] if self._running else ""
            self._running.append((path, n))
            return _mapped(args, "", self._note_input), _mapped(kwargs, "", self._note_input)

        return hook

    def _note_input(self, leaf: str, x: Tensor) -> Tensor:
        key = _Key(*self._running[-1], "in", leaf)
        x = x.view_as(x) if x.requires_grad else x  # of its own, so that its gradient is this submodule's part
        self._note(key, x)
        return x

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._live:
            return
        path, n = self._running.pop()
        for leaf, y in _leaves(output, ""):
            self._note(_Key(path, n, "out", leaf), y)
            if not self._running:
                self.outputs[leaf] = y

    def _note(self, key: _Key, x: Tensor) -> None:
        if not x.is_floating_point():
            return
        self.values[key] = x.detach().clone()
        if x.requires_grad:
            x.register_hook(lambda grad: self.grads.__setitem__(key, grad.detach().clone()))


def _mapped(x: Any, name: str, f: Any) -> Any:
    if isinstance(x, Tensor):
        return f(name, x)
    if type(x) in (tuple, list):
        return type(x)(_mapped(y, f"{name}[{i}]", f) for i, y in enumerate(x))
    if type(x) is dict:
        return {key: _mapped(y, f"{name}[{key!r}]", f) for key, y in x.items()}
    return x


def _leaves(x: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(x, Tensor):
        yield name, x
    elif isinstance(x, (tuple, list)):
        for i, y in enumerate(x):
            yield from _leaves(y, f"{name}[{i}]")
    elif isinstance(x, Mapping):
        for key, y in x.items():
            yield from _leaves(y, f"{name}[{key!r}]")


def _run_whole(module: nn.Module, x: Tensor, inputs: Mapping[str, Any], dtype: torch.dtype | None) -> _Record:
    record = _Record(module)
    try:
        module.zero_grad(set_to_none=True)
        record.forward(x, inputs)
        record.backward(_random_like(record.outputs))
    except Exception as error:
        if dtype is None:
            raise
        raise ValueError(
            f"dtype: expected one in which the module runs, got {dtype}: {error}. None leaves it as it is"
        ) from error
    return record


def _random_like(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    return {name: torch.randn(y.shape, generator=made, dtype=torch.float64).to(y) for name, y in outputs.items()}


def _refuse_random(module: nn.Module, x: Tensor, inputs: Mapping[str, Any], want: _Record) -> None:
    again = _Record(module)
    with torch.no_grad():
        again.forward(x, inputs)
    for key, value in want.values.items():
        if key not in again.values or _far(again.values[key], value)[0] > 1e-3:
            raise ValueError(
                "module: expected one that draws no random numbers (module.eval() turns dropout off), got other "
                f"values at submodule {key.path!r} in a second run"
            )


def _nudged(x: Any) -> Any:
    """Relative errors of a rounding, of float32 at least, in every number."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    roundoff = max(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps) / 2
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (x.detach() * (1 + roundoff * noise).to(x.device)).to(x.dtype)


def _with_nudged_parameters(module: nn.Module) -> nn.Module:
    module = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(_nudged(parameter))
    return module


# ------------------------------------------------------------------------------------------------ cutting, arguments


class _Shard(NamedTuple):
    start: int
    length: int
    total: int


def _converted(x: Any, dtype: torch.dtype | None) -> Any:
    return x.to(dtype) if dtype is not None and isinstance(x, Tensor) and x.is_floating_point() else x


def _cut(x: Any, dim: int, shard: _Shard) -> Any:
    """This rank's part of what has the tokens along ``dim``; anything else as it is."""
    if isinstance(x, Tensor) and x.dim() > max(1, dim) and x.shape[dim] == shard.total:
        return x.narrow(dim, shard.start, shard.length)
    return x


def _check_arguments(module: Any, sp: Any, x: Any, dim: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected an nn.Module, got {type(module).__name__}")
    if not isinstance(sp, SequenceParallel):
        raise TypeError(f"sp: expected a SequenceParallel (flexsp.init_sequence_parallel), got {type(sp).__name__}")
    check_dense("x", x, "a tensor, the whole batch,")
    if type(dim) is not int or not 0 <= dim < x.dim():
        raise ValueError(f"dim: expected one of the {x.dim()} axes of x, counted from 0, got {dim!r}")
    if x.shape[dim] == 0:
        raise ValueError(f"x: expected tokens along dim {dim}, got {list(x.shape)}")


def _same_everywhere(module: nn.Module, sp: SequenceParallel, given: Mapping[str, Any]) -> None:
    sums = {name: _checksum(value) for name, value in given.items()}
    sums |= {f"module: parameter {name}": _checksum(value) for name, value in module.state_dict().items()}
    for rank, theirs in enumerate(_gathered(sums, sp)):
        for name in (*sums, *theirs):
            if sums.get(name) != theirs.get(name):
                raise ValueError(f"{name}: expected the same on all ranks, got another on rank {rank}")


def _checksum(x: Any) -> tuple[Any, ...]:
    """Of all bits, in whole numbers: the same wherever it is computed."""
    if not isinstance(x, Tensor):
        return (type(x).__name__,)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(x.element_size(), torch.int64)
    numbers = x.detach().contiguous().flatten().view(bits).to(torch.int64)
    weights = torch.arange(1, numbers.numel() + 1, device=numbers.device) * 2654435761
    return (tuple(x.shape), str(x.dtype), int((numbers * weights).sum()))


def _gathered(x: Any, sp: SequenceParallel) -> list[Any]:
    if sp.world_size == 1:
        return [x]
    everyone: list[Any] = [None] * sp.world_size
    dist.all_gather_object(everyone, x, group=sp.cpu_group)
    return everyone


def _total(x: Tensor, sp: SequenceParallel) -> Tensor:
    return x if sp.world_size == 1 else sum_over_ranks(x, sp)


# --------------------------------------------------------------------------------------------------- comparing runs


def _far(got: Tensor, want: Tensor, size: float | None = None) -> tuple[float, float]:
    """(largest difference / root mean square of ``want``, that root mean square); inf where only one is finite."""
    if size is None:
        size = want.double().square().mean().sqrt().item() if want.numel() else 0.0
    if not got.numel():
        return 0.0, size
    difference = (got.double() - want.double()).abs().masked_fill(got == want, 0.0)
    difference = difference.masked_fill(got.isnan() & want.isnan(), 0.0).nan_to_num(nan=float("inf"))
    return difference.max().item() / (size if 0.0 < size < float("inf") else 1.0), size


def _aligned(want: Tensor, shape: torch.Size, shard: _Shard) -> Iterator[Tensor]:
    """The parts of ``want`` that this rank's tensor of ``shape`` may stand for, tokens along any axis."""
    if want.dim() != len(shape):
        return
    differ = [i for i, (a, b) in enumerate(zip(want.shape, shape, strict=True)) if a != b]
    if not differ and shard.length == shard.total:
        yield want
    if len(differ) != 1:
        return
    (at,) = differ
    a, b, (start, length, total) = want.shape[at], shape[at], shard
    if a - total == b - length and b >= length:
        yield want.narrow(at, start, b)  # as many padding tokens in both
    if a % total == 0 and a // total * length == b:
        yield want.unflatten(at, (a // total, total)).narrow(at + 1, start, length).flatten(at, at + 1)
        yield want.unflatten(at, (total, a // total)).narrow(at, start, length).flatten(at, at + 1)


class _Judge:
    """What differs between the whole run and the cut one, agreed on by all ranks."""

    def __init__(self, want: _Record, got: _Record, off: _Record, shard: _Shard, sp: SequenceParallel) -> None:
        self.want, self.got, self.off, self.shard, self.sp = want, got, off, shard, sp
        shapes = {key: tuple(x.shape) for key, x in got.values.items()}
        everywhere = _gathered(shapes, sp)
        # What has the whole's shape on all ranks is not cut: equal everywhere, or a part of a sum or mean.
        self.shared = {
            key for key, x in want.values.items()
            if sp.world_size > 1 and all(tuple(x.shape) == theirs.get(key) for theirs in everywhere)
        }  # fmt: skip
        self.compared = 0

    def cotangents(self) -> dict[str, Tensor]:
        """Of this rank's outputs; together they are those of the whole ones."""
        made = {}
        whole = {key.leaf: key for key in self.want.values if key[:3] == ("", 0, "out")}
        random = _random_like({leaf: self.want.values[key] for leaf, key in whole.items()})
        for leaf, key in whole.items():
            if key in self.shared:
                total = _total(self.got.values[key], self.sp)
                added = max(_gathered(_far(total, self.want.values[key])[0], self.sp)) < 1e-3
                made[leaf] = random[leaf] if added else random[leaf] / self.sp.world_size
            elif key in self.got.values:
                part = next(_aligned(random[leaf], self.got.values[key].shape, self.shard), None)
                if part is None:
                    shapes = f"{list(self.want.values[key].shape)} whole and {list(self.got.values[key].shape)} cut"
                    raise ValueError(f"module: expected outputs with the tokens along one axis, got {shapes}")
                made[leaf] = part.contiguous()
        return made

    def report(self, lengths: tuple[int, ...]) -> Verification:
        found = self._first_value() or self._first_gradient() or self._first_parameter()
        if found is None:
            return Verification(True, lengths, self.compared)
        path, what, detail, error, bound = found
        kind = type(self.want.module.get_submodule(path)).__name__
        return Verification(False, lengths, self.compared, path, kind, what, detail, error, bound)

    def _first_value(self) -> tuple[str, str, str, float, float] | None:
        for key, error, bound in self._worst(self.want.values, self.got.values, self.off.values):
            if not error <= bound:
                if key.side == "out":
                    return key.path, "output", "what it returns", error, bound
                return self.want.callers[key[:2]], "output", f"what it passes to {key.path!r}", error, bound
        return None

    def _first_gradient(self) -> tuple[str, str, str, float, float] | None:
        for key, error, bound in self._worst(self.want.grads, self.got.grads, self.off.grads):
            if not error <= bound:
                if key.side == "in":
                    return key.path, "gradient", "the gradient of its input", error, bound
                detail = f"the gradient of what {key.path!r} gives it"
                return self.want.callers[key[:2]], "gradient", detail, error, bound
        return None

    def _first_parameter(self) -> tuple[str, str, str, float, float] | None:
        cut, off = (dict(record.module.named_parameters()) for record in (self.got, self.off))
        mine: dict[str, tuple[float, float]] = {}
        for path, whole in reversed(list(self.want.module.named_parameters())):
            if whole.grad is None:
                continue
            part = cut[path].grad
            total = _total(torch.zeros_like(whole) if part is None else part, self.sp)
            error, size = _far(total, whole.grad)
            mine[path] = error, _bound(_noise(off[path].grad, whole.grad, size), whole.dtype)
        self.compared += len(mine)
        everyone = _gathered(mine, self.sp)
        for path in mine:
            error, bound = max(theirs[path] for theirs in everyone)
            if not error <= bound:
                owner, _, name = path.rpartition(".")
                return owner, "gradient", f"the gradient of its {name}", error, bound
        return None

    def _worst(
        self, want: Mapping[_Key, Tensor], got: Mapping[_Key, Tensor], off: Mapping[_Key, Tensor]
    ) -> Iterator[tuple[_Key, float, float]]:
        """Error and bound of every tensor, the worst of all ranks; the same on all."""
        mine: dict[_Key, tuple[float, float]] = {}
        for key, whole in want.items():
            shape = self.got.values[key].shape if key in self.got.values else None
            if key in self.shared or shape is None:
                continue
            part = got.get(key)
            if part is None:
                part = torch.zeros(shape, dtype=whole.dtype, device=whole.device)
            size = _far(whole, whole)[1]
            noise = _noise(off.get(key), whole, size)
            errors = [_far(part, x, size)[0] for x in _aligned(whole, part.shape, self.shard)]
            if errors:
                mine[key] = (min(errors), _bound(noise, whole.dtype))
        everyone = _gathered(mine, self.sp)
        for key, whole in want.items():
            if key in self.shared:
                self.compared += 1
                yield key, *self._of_shared(whole, got.get(key), off.get(key))
            elif judged := [theirs[key] for theirs in everyone if key in theirs]:
                self.compared += 1
                yield key, *max(judged)

    def _of_shared(self, whole: Tensor, mine: Tensor | None, off: Tensor | None) -> tuple[float, float]:
        """Error of what is not cut, as the same everywhere, as a sum or as a mean, whichever it is."""
        part = torch.zeros_like(whole) if mine is None else mine
        total, size = _total(part, self.sp), _far(whole, whole)[1]
        errors = tuple(_far(x, whole, size)[0] for x in (part, total, total / self.sp.world_size))
        bound = _bound(_noise(off, whole, size), whole.dtype)
        everyone = _gathered((*errors, bound), self.sp)
        *worst, bound = (max(column) for column in zip(*everyone, strict=True))
        return min(worst), bound


def _noise(off: Tensor | None, whole: Tensor, size: float) -> float:
    """How far a rounding of everything that is given carries a value."""
    return 0.0 if off is None else _far(off, whole, size)[0]


def _bound(noise: float, dtype: torch.dtype) -> float:
    return _NOISE * noise + _ROUNDINGS * torch.finfo(dtype).eps
