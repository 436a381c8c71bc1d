"""verify: runs a module on a batch cut over ranks and on the whole batch, and compares submodule by submodule."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flexsp.comm.collectives import sum_over_ranks
from flexsp.comm.group import SequenceParallel, refuse_bitwise, sequence_parallel
from flexsp.comm.process_group import exchange_ints
from flexsp.exceptions import NotExact, PeerMismatch, PeerTimeout, check_dense
from flexsp.nn.recording import Key, Record, each, has_gradient
from flexsp.nn.wrapper import SequenceParallelLA, unwrap

__all__ = ["Verification", "verify"]

# Rounding explains an error of up to _NOISE times the change that a rounding of every input and parameter makes, plus
# _ROUNDINGS epsilons, but never more than _LARGEST or _LARGEST_ROUNDINGS epsilons, whichever is larger. The factors
# leave room for the other order of sums in cut runs.
_NOISE = 32
_ROUNDINGS = 64
_LARGEST = 1e-3
_LARGEST_ROUNDINGS = 16
_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}
R = TypeVar("R")


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
        return (
            f"not exact {cut}: {_place(self.submodule or '', self.kind)} is the first whose {self.what} differs from "
            f"that of the whole sequence ({self.detail}: off by {self.error:.2g} of the root mean square, "
            f"rounding explains {self.bound:.2g})"
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
            called for as many tokens, else into uneven parts, off the edges of chunks: between equal ones the mean
            of a shard's tokens looks like a part of a mean over all.
        dtype: what floating parameters and inputs are converted to first (complex ones to the complex type of that
            precision). In float64 rounding hides no fault. None or another dtype is for modules that do not run in it.
        raise_on_error: raise instead of returning a Verification that is not ok.
        inputs: further arguments of ``module``. Tensors of two or more axes with as many tokens along ``dim`` are cut
            too, in lists, tuples and dicts as well; others, such as global ``cu_seqlens``, are passed as they are.

    Raises:
        NotExact: something differs; its ``report`` is the Verification.
        ValueError: bad arguments, a module that raises on a rank, or what cannot be judged: random numbers, other
            arguments or parameters on some rank, outputs without tensors, values that differ but that a rounding of
            the inputs moves as far, or that are right only as a part of a mean over shards of equal lengths.

    Example:
        >>> flexsp.verify(model, sp, torch.randint(256, (1, 300)))
    """
    _check_arguments(module, sp, x, dim)
    refuse_bitwise(sp, "verify")  # it cuts the batch off the edges of segments
    sp.check()
    total, known = x.shape[dim], sp.lengths
    lengths = known if known is not None and sum(known) == total else _uneven(total, sp)
    shard = _Shard(sum(lengths[: sp.rank]), lengths[sp.rank], total)
    whole = unwrap(copy.deepcopy(module))
    if dtype is not None:
        whole._apply(lambda t: _converted(t, dtype))
    x, inputs = _converted(x, dtype), each(inputs, lambda t: _converted(t, dtype))
    _same_everywhere(whole, sp, {"dim": dim, "sp.set_lengths": lengths, "x": x, **inputs})

    def alone() -> tuple[Record, Record]:
        with sequence_parallel(None):
            want = _run_whole(whole, x, inputs, dtype)
            _refuse_unseen(want)
            _refuse_random(whole, x, inputs, want)
            return want, _run_whole(_with_nudged_parameters(whole), _nudged(x), each(inputs, _nudged), dtype)

    want, off = _on_all_ranks(alone, sp, f"{total} tokens")
    sp.set_lengths(lengths)
    try:
        got = Record(SequenceParallelLA(copy.deepcopy(whole), sp, allow=("",)))
        mine, part = each(inputs, lambda t: _cut(t, dim, shard)), x.narrow(dim, shard.start, shard.length)
        how = f"{shard.length} of {total} tokens"
        _on_all_ranks(lambda: got.forward(part, mine), sp, how)
        judge = _Judge(want, got, off, shard, tuple(lengths), sp)
        cotangents = judge.cotangents()
        _on_all_ranks(lambda: got.backward(cotangents), sp, f"the gradient of {how}")
        report = judge.report()
    finally:
        sp.set_lengths(known)
    if raise_on_error and not report.ok:
        raise NotExact(report)
    return report


# ----------------------------------------------------------------------------------------- running a module whole


def _run_whole(module: nn.Module, x: Tensor, inputs: Mapping[str, Any], dtype: torch.dtype | None) -> Record:
    record = Record(module)
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
    return {
        name: torch.randn(y.shape, generator=made, dtype=torch.complex128 if y.is_complex() else torch.float64).to(y)
        for name, y in outputs.items()
        if has_gradient(y)
    }


def _refuse_unseen(want: Record) -> None:
    seen = "tensors and numbers, in tuples, lists, dicts or attributes"
    for leaf, kind in want.unseen.items():
        raise ValueError(f"module: cannot be judged: expected an output of {seen}, got a {kind} at output{leaf}")
    if not any(key[:3] == ("", 0, "out") for key in want.values):
        raise ValueError(f"module: cannot be judged: expected an output of {seen}, got none")


def _refuse_random(module: nn.Module, x: Tensor, inputs: Mapping[str, Any], want: Record) -> None:
    again = Record(module)
    again.forward(x, inputs)
    for key, value in want.values.items():
        if key not in again.values or _far(again.values[key], value)[0] > 1e-3:
            raise ValueError(
                "module: expected one that draws no random numbers (module.eval() turns dropout off), got other "
                f"values at submodule {key.path!r} in a second run"
            )


def _nudged(x: Tensor) -> Tensor:
    """x with a random relative error of the size of a rounding in every number; of float32's rounding at least."""
    x = x.detach()
    if x.is_complex():
        return torch.view_as_complex(_nudged(torch.view_as_real(x)))
    if not x.is_floating_point():
        return x
    roundoff = max(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps) / 2
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (x * (1 + roundoff * noise).to(x.device)).to(x.dtype)


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


def _uneven(total: int, sp: SequenceParallel) -> list[int]:
    """Balanced lengths, except that half of the last rank's tokens go to the first. Cuts are at odd tokens, where no
    chunk of 16 or 64 tokens starts, since some faults do not show at the edge of a chunk."""
    lengths = sp.partition(total)
    moved = lengths[-1] // 2
    lengths[-1] -= moved
    lengths[0] += moved
    for rank in range(1, len(lengths)):
        if sum(lengths[:rank]) % 2 == 0 and lengths[rank] > 1:
            lengths[rank - 1] += 1
            lengths[rank] -= 1
    return lengths


def _converted(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    if x.is_complex():
        return x.to(_COMPLEX.get(dtype, x.dtype)) if dtype is not None else x
    return x.to(dtype) if dtype is not None and x.is_floating_point() else x


def _cut(x: Tensor, dim: int, shard: _Shard) -> Tensor:
    """This rank's part of a further input if that has the tokens along ``dim``, else all of it."""
    if x.dim() > max(1, dim) and x.shape[dim] == shard.total:
        return x.narrow(dim, shard.start, shard.length)
    return x


def _check_arguments(module: Any, sp: Any, x: Any, dim: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected an nn.Module, got {type(module).__name__}")
    if not isinstance(sp, SequenceParallel):
        raise TypeError(f"sp: expected a SequenceParallel (flexsp.init_sequence_parallel), got {type(sp).__name__}")
    check_dense("x", x, "a tensor (the whole batch)")
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
    """A sum over all bits, in integers: the same on every device. For other objects, what ranks can compare of them."""
    kind = type(x).__name__
    if isinstance(x, (tuple, list)):
        return (kind, *map(_checksum, x))
    if isinstance(x, Mapping):
        return (kind, *((repr(key), _checksum(value)) for key, value in x.items()))
    if not isinstance(x, Tensor):
        return (kind, repr(x)) if x is None or isinstance(x, (bool, int, float, complex, str, bytes)) else (kind,)
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


def _on_all_ranks(run: Callable[[], R], sp: SequenceParallel, what: str) -> R:
    """``run()``. An error on one rank raises on all, so that none of them waits for the others."""
    result, failure, abandoned = None, None, sp.abandoned
    try:
        result = run()
    except Exception as error:  # noqa: BLE001
        failure, sp.abandoned = error, abandoned  # the exchange below tells the others
    said = "" if failure is None else f"{type(failure).__name__}: {failure}"
    try:
        failed = any(exchange_ints(sp, int(failure is not None))) if sp.world_size > 1 else failure is not None
    except (PeerMismatch, PeerTimeout) as error:  # a rank has failed while another waits for it in an exchange
        if failure is None or isinstance(failure, (PeerMismatch, PeerTimeout)):
            said = f"an error on another rank meanwhile ({failure or error})"
        expected = f"module: expected one that runs on {what} on rank {sp.rank}"
        raise ValueError(f"{expected}, got {said}") from failure or error
    if failed:
        rank, (how, text) = next((rank, x) for rank, x in enumerate(_gathered((what, said), sp)) if x[1])
        if isinstance(failure, ValueError) and str(failure).startswith(("dtype: ", "module: ")):
            raise failure
        raise ValueError(f"module: expected one that runs on {how}, got {text} on rank {rank}") from failure
    return result  # type: ignore[return-value]


def _total(x: Tensor, sp: SequenceParallel) -> Tensor:
    if sp.world_size == 1:
        return x
    if x.is_complex():
        return torch.view_as_complex(sum_over_ranks(torch.view_as_real(x).contiguous(), sp))
    return sum_over_ranks(x if x.is_floating_point() else x.long(), sp)


# --------------------------------------------------------------------------------------------------- comparing runs


def _far(got: Tensor, want: Tensor, size: float | None = None) -> tuple[float, float]:
    """(largest difference / root mean square of ``want``, that root mean square); inf where only one is finite."""
    if got.is_complex() or want.is_complex():
        got, want = (torch.view_as_real(x.to(torch.complex128)) for x in (got, want))
    if size is None:
        size = want.double().square().mean().sqrt().item() if want.numel() else 0.0
    if not got.numel():
        return 0.0, size
    difference = (got.double() - want.double()).abs()
    if not (got.is_floating_point() or want.is_floating_point()):
        difference = difference.clamp(min=1.0)  # two large integers may be equal in float64
    difference = difference.masked_fill(got == want, 0.0)
    difference = difference.masked_fill(got.isnan() & want.isnan(), 0.0).nan_to_num(nan=float("inf"))
    return difference.max().item() / (size if 0.0 < size < float("inf") else 1.0), size


class _Found(NamedTuple):
    """An error, how far rounding alone may carry the values, and the most that it may explain."""

    error: float
    bound: float
    largest: float

    @property
    def fine(self) -> bool:
        return self.error <= min(self.bound, self.largest)

    @property
    def unclear(self) -> bool:
        return not self.fine and self.error <= self.bound


def _found(error: float, off: Tensor | None, whole: Tensor, size: float) -> _Found:
    noise = 0.0 if off is None else _far(off, whole, size)[0]
    if not has_gradient(whole):
        return _Found(error, _NOISE * noise, 0.0)
    eps = torch.finfo(whole.dtype).eps
    return _Found(error, _NOISE * noise + _ROUNDINGS * eps, max(_LARGEST, _LARGEST_ROUNDINGS * eps))


def _place(path: str, kind: str) -> str:
    return f"submodule {path!r} ({kind})" if path else f"the module itself ({kind})"


def _aligned(want: Tensor, shape: torch.Size, shard: _Shard) -> Iterator[Tensor]:
    """The parts of ``want`` that this rank's tensor of ``shape`` may be, with tokens along any axis."""
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
    """Compares the whole run and the cut one; all ranks come to the same result."""

    def __init__(
        self, want: Record, got: Record, off: Record, shard: _Shard, lengths: tuple[int, ...], sp: SequenceParallel
    ) -> None:
        self.want, self.got, self.off, self.shard, self.lengths, self.sp = want, got, off, shard, lengths, sp
        shapes = {key: tuple(x.shape) for key, x in got.values.items()}
        everywhere = _gathered(shapes, sp)
        # A tensor with the whole one's shape on all ranks is not cut: it is equal on all, or a part of a sum or mean.
        self.shared = {
            key for key, x in want.values.items()
            if sp.world_size > 1 and all(tuple(x.shape) == theirs.get(key) for theirs in everywhere)
        }  # fmt: skip
        self.compared = 0

    def cotangents(self) -> dict[str, Tensor]:
        """The gradients of this rank's outputs that start its backward pass; together, those of the whole run."""
        made, problems = {}, []
        whole = {key.leaf: key for key in self.want.values if key[:3] == ("", 0, "out")}
        random = _random_like({leaf: self.want.values[key] for leaf, key in whole.items()})
        for leaf, key in whole.items():
            value, mine = self.want.values[key], self.got.values.get(key)
            if key in self.shared and leaf in random:
                assert mine is not None
                added = max(_gathered(_far(_total(mine, self.sp), value)[0], self.sp)) < 1e-3
                made[leaf] = random[leaf] if added else random[leaf] / self.sp.world_size
            elif key not in self.shared:
                part = None if mine is None else next(_aligned(random.get(leaf, value), mine.shape, self.shard), None)
                if part is None:
                    cut = "none" if mine is None else list(mine.shape)
                    problems.append(f"{list(value.shape)} whole and {cut} cut at output{leaf}")
                elif leaf in random:
                    made[leaf] = part.contiguous()
        problems += [f"output{key.leaf} only where cut" for key in self.got.values
                     if key[:3] == ("", 0, "out") and key not in self.want.values]  # fmt: skip
        for rank, theirs in enumerate(_gathered(problems, self.sp)):
            for problem in theirs:
                raise ValueError(
                    "module: cannot be judged: expected outputs with the tokens along one axis, or the same shape on "
                    f"all ranks, got {problem} on rank {rank}"
                )
        return made

    def report(self) -> Verification:
        for path, what, detail, found in self._all():
            kind = type(self.want.module.get_submodule(path)).__name__
            if found.unclear:
                raise ValueError(
                    f"module: cannot be judged: {what} of {_place(path, kind)} is off by {found.error:.2g} of the root "
                    f"mean square ({detail}), expected at most {found.largest:.2g}, and a rounding of the inputs moves "
                    f"it by {found.bound / _NOISE:.2g}: values on an edge (round, argmax, a comparison, a pole), or "
                    "too low a precision. Try another x, or dtype=torch.float64"
                )
            if not found.fine:
                error, bound = found.error, min(found.bound, found.largest)
                return Verification(False, self.lengths, self.compared, path, kind, what, detail, error, bound)
        return Verification(True, self.lengths, self.compared)

    def _all(self) -> Iterator[tuple[str, str, str, _Found]]:
        """Every comparison, in the order in which a fault would show: path, what, detail, error and bounds."""
        for key, found in self._worst(self.want.values, self.got.values, self.off.values):
            if key.side == "out":
                yield key.path, "output", "what it returns", found
            else:
                yield self.want.callers[key[:2]], "output", f"what it passes to {key.path!r}", found
        for key, found in self._worst(self.want.grads, self.got.grads, self.off.grads):
            if key.side == "in":
                yield key.path, "gradient", "the gradient of its input", found
            else:
                yield self.want.callers[key[:2]], "gradient", f"the gradient of what {key.path!r} gives it", found
        yield from self._parameters()

    def _parameters(self) -> Iterator[tuple[str, str, str, _Found]]:
        cut, off = (dict(record.module.named_parameters()) for record in (self.got, self.off))
        mine: dict[str, _Found] = {}
        for path, whole in reversed(list(self.want.module.named_parameters())):
            if whole.grad is None:
                continue
            part = cut[path].grad
            total = _total(torch.zeros_like(whole) if part is None else part, self.sp)
            error, size = _far(total, whole.grad)
            mine[path] = _found(error, off[path].grad, whole.grad, size)
        self.compared += len(mine)
        everyone = _gathered(mine, self.sp)
        for path in mine:
            owner, _, name = path.rpartition(".")
            yield owner, "gradient", f"the gradient of its {name}", max(theirs[path] for theirs in everyone)

    def _worst(
        self, want: Mapping[Key, Tensor], got: Mapping[Key, Tensor], off: Mapping[Key, Tensor]
    ) -> Iterator[tuple[Key, _Found]]:
        """Error and bound of every tensor, the worst of all ranks; the same on all."""
        mine: dict[Key, _Found] = {}
        for key, whole in want.items():
            shape = self.got.values[key].shape if key in self.got.values else None
            if key in self.shared or shape is None:
                continue
            part = got.get(key)
            if part is None:
                part = torch.zeros(shape, dtype=whole.dtype, device=whole.device)
            size = _far(whole, whole)[1]
            errors = [_far(part, x, size)[0] for x in _aligned(whole, part.shape, self.shard)]
            if errors:
                mine[key] = _found(min(errors), off.get(key), whole, size)
        everyone = _gathered(mine, self.sp)
        for key, whole in want.items():
            if key in self.shared:
                self.compared += 1
                yield key, self._of_shared(key, whole, got.get(key), off.get(key))
            elif judged := [theirs[key] for theirs in everyone if key in theirs]:
                self.compared += 1
                yield key, max(judged)

    def _of_shared(self, key: Key, whole: Tensor, mine: Tensor | None, off: Tensor | None) -> _Found:
        """The error of a tensor that is not cut: the least of its errors as an equal value, as a part of a sum and as a
        part of a mean."""
        part = torch.zeros_like(whole) if mine is None else mine
        total, size = _total(part, self.sp), _far(whole, whole)[1]
        readings = (part, total, total / self.sp.world_size)
        everyone = _gathered([_found(_far(x, whole, size)[0], off, whole, size) for x in readings], self.sp)
        same, added, mean = (max(column) for column in zip(*everyone, strict=True))
        if mean.fine and not (same.fine or added.fine) and len(set(self.lengths)) == 1:
            raise ValueError(
                f"sp.set_lengths: cannot be judged: expected uneven lengths, got {list(self.lengths)}: what "
                f"{key.path!r} {'takes' if key.side == 'in' else 'gives'} is right as a part of a mean over the ranks, "
                "which between equal lengths the mean of a rank's own tokens is too"
            )
        return min(same, added, mean)
