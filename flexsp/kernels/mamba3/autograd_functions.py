"""Entry of Mamba-3's kernels: their launches, and what autograd sees of them.

`steps` and `turns` come before the ranks exchange weights and sums, `rows` after that, then the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flexsp.comm.derivatives import IN_PYTORCH, keep_for_backward, kept_for_backward, untransformed
from flexsp.devices import check_heads
from flexsp.kernels.mamba3 import rotations
from flexsp.kernels.mamba3 import steps as of_steps
from flexsp.kernels.mamba3 import turns as sums
from flexsp.kernels.run import power_of_2, run

__all__ = ["Rows", "rows", "steps", "turning", "turns"]

_NAME = "the kernels of Mamba-3"
_BYTES = 4096  # of a tile of `rows_kernel`
_CHANNELS = 128  # heads times angles, of a program that sums up
_SHARED = 512  # where heads have their angles in common: a thread turns some heads by one
_ADDED = 256  # where a warp adds up the gradients of these over heads
_SEGMENT = 64  # tokens at least
_SEGMENTS = 512  # at most
_TOKENS = 2048  # times heads, of a program that makes gates
_STEP = 8  # tokens whose numbers are loaded before the first is computed
_HEADS = 8  # of a program of `rows_kernel` at most
_STAGES = 3  # of `rows_kernel`: heads whose numbers are on their way while one is computed, and that one
_PAIRS = 512  # times tokens, of a program of `rows_grad_kernel`, but no less than _LEAST_TOKENS of them
_LEAST_TOKENS = 8  # there are sums of every program
# Pairs times tokens: where one warp has them all, no warp waits for another one at every head's sums. Of more tokens
# than _LEAST_TOKENS its registers hold half as many.
_OF_A_WARP = 256

Tensor = torch.Tensor
Optional = torch.Tensor | None


def _dense(x: Tensor) -> Tensor:
    """x as kernels read gradients of it: memory behind every number, numbers of a row next to each other."""
    x = _in_memory(x)
    return x if x.stride(-1) == 1 else x.contiguous()


def _in_memory(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x._is_zerotensor() else x.resolve_neg()


# Running sums ---------------------------------------------------------------------------------------------------------


class _Cut(NamedTuple):
    """How sums of [batch, T, H, S] are cut into tiles and segments."""

    batch: int
    T: int
    H: int
    S: int
    per_seg: int

    @property
    def n_seg(self) -> int:
        return -(-self.T // self.per_seg)

    @property
    def numbers(self) -> tuple[int, int, int]:
        return self.T, self.n_seg, self.per_seg

    def walk(self, kernel: Any, tensors: Mapping[str, Tensor], strides: Sequence[int], **constants: bool) -> None:
        added, shared = constants.get("ADDED"), constants.get("SHARED")
        BS, BH = power_of_2(self.S), self.heads(_ADDED if added else _SHARED if shared else _CHANNELS)
        tile = {"H": self.H, "S": self.S, "BH": BH, "BS": BS, "STEP": _STEP}
        grid = (-(-self.H // BH) * self.n_seg * self.batch, 1, 1)
        warps = 1 if added else max(1, min(4, BH * BS // 32))
        run(kernel, grid, tensors, (*strides, *self.numbers), tile | constants, warps)

    def heads(self, channels: int) -> int:
        """Of a tile of this number of channels."""
        return max(1, min(power_of_2(self.H), channels // power_of_2(self.S)))

    def scan(self, found: Mapping[str, Tensor], initial: Optional, packed: bool, reverse: bool) -> Tensor:
        """What enters the segments, [batch, n_seg, H, S]."""
        enters = torch.empty_like(found["sums"])
        tensors = {**found, "initial": found["sums"] if initial is None else initial, "enters": enters}
        width = self.H * self.S
        block = min(32, power_of_2(width))
        constants = {"W": width, "BW": block, "STEP": 16, "PACKED": packed, "INITIAL": initial is not None}
        grid = (-(-width // block), self.batch, 1)
        run(sums.turn_scan_kernel, grid, tensors, (self.n_seg,), constants | {"REVERSE": reverse}, 1)
        return enters

    def empty(self, like: Tensor) -> dict[str, Tensor]:
        """Sums of segments, and whether documents begin there."""
        shape = self.batch, self.n_seg
        return {
            "sums": like.new_empty(*shape, self.H, self.S, dtype=torch.float64),
            "cuts": like.new_empty(shape, dtype=torch.int32),
        }


def _cut(angles: Tensor, dt: Tensor) -> _Cut:
    (batch, T, H), S = dt.shape, angles.shape[3]
    least = max(_SEGMENT, -(-T // _SEGMENTS))
    return _Cut(batch, T, H, S, -(-least // _STEP) * _STEP)


def _given(angles: Tensor, dt: Tensor, resets: Optional) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """Pointers and strides."""
    return {"angles": angles, "dt": dt, "resets": dt if resets is None else resets}, (*angles.stride(), *dt.stride())


def _shared(angles: Tensor) -> bool:
    """Whether all heads have the same angles, in the same memory."""
    return angles.shape[2] == 1 or angles.stride(2) == 0


class _Turns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, angles: Tensor, dt: Tensor, initial: Optional, resets: Optional) -> tuple[Tensor, Tensor]:
        cut, packed = _cut(angles, dt), resets is not None
        tensors, strides = _given(angles, dt, resets)
        found, how = cut.empty(dt), {"PACKED": packed, "INITIAL": packed and initial is not None}
        how["SHARED"] = _shared(angles)
        tensors["initial"] = dt if initial is None else initial
        cut.walk(sums.turn_sums_kernel, {**tensors, **found}, strides, **how)
        turned = dt.new_empty(*dt.shape, cut.S, dtype=torch.float32)
        last = dt.new_zeros(cut.batch, cut.H, cut.S, dtype=torch.float32)
        tensors["enters"] = cut.scan(found, None if packed else initial, packed, reverse=False)
        cut.walk(sums.turns_kernel, {**tensors, "turns": turned, "last": last}, strides, **how)
        keep_for_backward(ctx, angles, dt, resets)
        ctx.initial = None if initial is None else initial.shape
        ctx.set_materialize_grads(False)
        return turned, last

    @staticmethod
    def backward(ctx: Any, dturns: Optional, dlast: Optional) -> tuple[Optional, ...]:
        angles, dt, resets = kept_for_backward(ctx, _NAME, dturns, dlast)
        cut, packed = _cut(angles, dt), resets is not None
        tensors, strides = _given(angles, dt, resets)
        if dturns is None:
            dturns = dt.new_zeros(*dt.shape, cut.S, dtype=torch.float32)
        dturns = _dense(dturns).contiguous()
        dlast = None if dlast is None else _dense(dlast).contiguous()
        found = cut.empty(dt)
        cut.walk(
            sums.turn_grad_sums_kernel, {"dturns": dturns, "resets": tensors["resets"], **found}, (), PACKED=packed
        )  # fmt: skip
        tensors |= {"enters": cut.scan(found, dlast, packed, reverse=True), "dturns": dturns}
        dinitial = None if ctx.initial is None else dt.new_zeros(ctx.initial, dtype=torch.float32)
        return *_turns_grad(cut, tensors, strides, dinitial, packed=packed, summed=False), dinitial, None


def turns(angles: Tensor, dt: Tensor, initial: Optional, resets: Optional) -> tuple[Tensor, Tensor]:
    """Sums of 0.5 tanh(angles) dt up to each token, itself included, without whole turns.

    Args:
        angles: [B, T, H, S], or [B, T, 1, S] of all heads; any strides.
        dt: [B, T, H], any strides.
        initial: [N, H, S] in float32: what sums begin with, in turns; of sequences, or of documents, or None.
        resets: the document that begins with a token, or -1, [T] in int32; None for sequences.

    Returns:
        The sums [B, T, H, S] in -1/2..1/2, and those of the last tokens [B, H, S], 0 without tokens; in float32, summed
        in float64.
    """
    untransformed(_NAME, IN_PYTORCH)
    batch, _, H = dt.shape
    check_heads("x", batch, H)
    found: tuple[Tensor, Tensor] = _Turns.apply(angles, dt, None if initial is None else initial.contiguous(), resets)
    return found


class _Turning(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, angles: Tensor, dt: Tensor, sums: Tensor) -> Tensor:
        keep_for_backward(ctx, angles, dt)
        return sums.view_as(sums)

    @staticmethod
    def backward(ctx: Any, dturns: Tensor) -> tuple[Tensor, Tensor, None]:
        angles, dt = kept_for_backward(ctx, _NAME, dturns)
        cut = _cut(angles, dt)
        tensors, strides = _given(angles, dt, None)
        tensors |= {"enters": dt, "dturns": _dense(dturns).contiguous()}
        dangles, ddt = _turns_grad(cut, tensors, strides, None, packed=False, summed=True)
        return dangles, ddt, None


def turning(angles: Tensor, dt: Tensor, sums: Tensor) -> Tensor:
    """The `sums` of `turns`, for an engine that gives the gradients of their steps 0.5 tanh(angles) dt."""
    untransformed(_NAME, IN_PYTORCH)
    found: Tensor = _Turning.apply(angles, dt, sums.detach())
    return found


def _turns_grad(
    cut: _Cut, tensors: dict[str, Tensor], strides: tuple[int, ...], dinitial: Optional, *, packed: bool, summed: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of angles and dt, by `turns_grad_kernel`, which takes `tensors` first; writes `dinitial`."""
    angles, dt = tensors["angles"], tensors["dt"]
    added = angles.shape[2] < cut.H
    blocks = -(-cut.H // cut.heads(_ADDED))
    like = dt.new_empty(cut.batch, cut.T, blocks, cut.S, dtype=torch.float32) if added else angles
    dangles = torch.empty_like(like, memory_format=torch.contiguous_format)
    ddt = dt.new_empty(dt.shape, dtype=torch.float32)
    made = {"dangles": dangles, "ddt": ddt, "dinitial": ddt if dinitial is None else dinitial}
    cut.walk(
        sums.turns_grad_kernel, {**tensors, **made}, strides, PACKED=packed, INITIAL=dinitial is not None,
        SHARED=_shared(angles), ADDED=added, SUMMED=summed,
    )  # fmt: skip
    return dangles.sum(2, keepdim=True).to(angles.dtype) if added else dangles, ddt.to(dt.dtype)


# Steps ----------------------------------------------------------------------------------------------------------------


def _run_steps(kernel: Any, tensors: Mapping[str, Tensor], strided: int) -> None:
    """Of tensors [B, T, H], of which the first `strided` may have any strides."""
    given = list(tensors.values())
    batch, T, H = given[0].shape
    BH = min(128, power_of_2(H))
    BT = max(1, _TOKENS // BH)
    blocks = -(-T // BT)
    numbers = [n for x in given[:strided] for n in x.stride()]
    run(kernel, (batch * blocks, -(-H // BH), 1), tensors, (*numbers, T, blocks), {"H": H, "BT": BT, "BH": BH})


class _Steps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dt: Tensor, A: Tensor, trap: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, gamma, eta = (dt.new_empty(dt.shape, dtype=torch.float32) for _ in range(3))
        made = {"gate": gate, "gamma": gamma, "eta": eta}
        _run_steps(of_steps.steps_kernel, {"dt": dt, "A": A, "trap": trap, **made}, 3)
        keep_for_backward(ctx, dt, A, trap)
        ctx.set_materialize_grads(False)
        return gate, gamma, eta

    @staticmethod
    def backward(ctx: Any, *grads: Optional) -> tuple[Optional, ...]:
        dt, A, trap = kept_for_backward(ctx, _NAME, *grads)
        given = [dt.new_zeros(dt.shape, dtype=torch.float32) if g is None else _in_memory(g) for g in grads]
        found = [x.new_empty(x.shape) for x in (dt, A, trap)]
        names = "dt", "A", "trap", "dgate", "dgamma", "deta", "ddt", "dA", "dtrap"
        tensors = dict(zip(names, (dt, A, trap, *given, *found), strict=True))
        _run_steps(of_steps.steps_grad_kernel, tensors, 6)
        return tuple(found)


def steps(dt: Tensor, A: Tensor, trap: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log gates dt A, and weights sigmoid(trap) dt and (1 - sigmoid(trap)) dt, of [B, T, H] with any strides: in
    float32."""
    untransformed(_NAME, IN_PYTORCH)
    found: tuple[Tensor, Tensor, Tensor] = _Steps.apply(dt, A, trap)
    return found


# Rotations ------------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """What the engine reads.

    Attributes:
        q, k: rows of the recurrence, [B, T, H, K].
        w: [B, T, H] in float32, the factor of a token's own values; tokens of a head lie side by side.
    """

    q: Tensor
    k: Tensor
    w: Tensor


def _constants(given: dict[str, Optional], halves: bool, backward: bool) -> dict[str, Any]:
    """Of the kernels, with their tile: BT tokens and BP pairs of channels, and whether there are others beside it, of
    pairs that do not turn."""
    B, turned = given["b"], given["turns"]
    assert B is not None and turned is not None
    pairs = power_of_2(-(-B.shape[3] // 2))
    still = pairs >= 2 * turned.shape[3]
    if backward:
        BT = max(_LEAST_TOKENS, min(32, _PAIRS // pairs))
    else:
        BT = max(1, min(64, _BYTES // (2 * pairs * B.dtype.itemsize)))
    BP = pairs // 2 if still else pairs
    return {
        "H": turned.shape[2], "G": B.shape[2], "K": B.shape[3], "S": turned.shape[3], "BT": BT, "BP": BP,
        "STILL": still, "STAGES": 1 if backward else _STAGES, "HALVES": halves, "B_BIAS": given["b_bias"] is not None,
        "C_BIAS": given["c_bias"] is not None, "ARRIVED": given["arrived"] is not None,
        "PACKED": given["until"] is not None,
    }  # fmt: skip


def _divisor(n: int, most: int) -> int:
    return next(size for size in range(min(n, most), 0, -1) if n % size == 0)


def _pointers(given: Mapping[str, Optional]) -> dict[str, Tensor]:
    """Those that a kernel does not use are that of the turns."""
    turned = given["turns"]
    assert turned is not None
    return {name: turned if x is None else x for name, x in given.items()}


_ROWS = ("b", "c", "b_bias", "c_bias", "turns", "arrived", "until", "gamma", "eta")


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halves: bool, d: Optional, *inputs: Optional) -> Rows:
        given = dict(zip(_ROWS, inputs, strict=True))
        B, C, turned = (given[name] for name in ("b", "c", "turns"))
        assert B is not None and C is not None and turned is not None
        (batch, T, H), K = turned.shape[:3], B.shape[3]
        constants = _constants(given, halves, False)
        heads = _divisor(H // B.shape[2], _HEADS)
        constants |= {"SKIP": d is not None, "HEADS": heads}
        q, k = B.new_empty(batch, T, H, K), B.new_empty(batch, T, H, K)
        own, w = turned.new_empty(batch, T, H), turned.new_empty(batch, H, T)
        blocks = -(-T // constants["BT"])
        tensors = _pointers({**given, "d": d, "q": q, "k": k, "own": own, "w": w})
        numbers = *B.stride()[:3], *C.stride()[:3], T, blocks
        run(rotations.rows_kernel, (batch * blocks, H // heads, 1), tensors, numbers, constants)
        keep_for_backward(ctx, own, *inputs)
        ctx.halves, ctx.skip = halves, None if d is None else d.dtype
        ctx.set_materialize_grads(False)
        return Rows(q, k, w.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *grads: Optional) -> tuple[Optional, ...]:
        own, *inputs = kept_for_backward(ctx, _NAME, *grads)
        given = dict(zip(_ROWS, inputs, strict=True))
        dq, dk, dw = _cotangents(own, inputs[0], grads)
        found = _row_grads({**given, "own": own}, dq, dk, dw, ctx.halves)
        dd = None if ctx.skip is None else dw.sum((0, 2)).to(ctx.skip)
        return None, dd, *[found.get(name) for name in _ROWS]


def _cotangents(own: Tensor, B: Tensor, grads: Sequence[Optional]) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k and w, as the engine gives them: row by row, and tokens of a head side by side."""
    dq, dk = (B.new_zeros(*own.shape, B.shape[3]) if g is None else _dense(g).contiguous() for g in grads[:2])
    dw = own.new_zeros(own.shape) if grads[2] is None else _in_memory(grads[2])
    return dq, dk, dw.transpose(1, 2).contiguous()


def _row_grads(given: dict[str, Optional], dq: Tensor, dk: Tensor, dw: Tensor, halves: bool) -> dict[str, Optional]:
    """Gradients of the tensors of `_ROWS`."""
    constants = _constants(given, halves, True)
    of_a_warp = _OF_A_WARP if constants["BT"] == _LEAST_TOKENS else _OF_A_WARP // 2
    warps = max(1, min(4, constants["BT"] * constants["BP"] // of_a_warp))
    tensors = _pointers(given)
    B, C, (batch, T, H) = tensors["b"], tensors["c"], tensors["turns"].shape[:3]
    G, K = B.shape[2:]
    blocks = -(-T // constants["BT"])
    programs = batch * blocks
    wide = {
        "dbiases": (programs, H, 2, K) if constants["B_BIAS"] or constants["C_BIAS"] else (0,),
        "dweights": (batch, T, H, 2), "still": (batch, T, H) if constants["STILL"] else (0,),
    }  # fmt: skip
    made = {"db": B.new_empty(B.shape), "dc": C.new_empty(C.shape)}
    made |= {name: dw.new_empty(shape) for name, shape in wide.items()}
    for turns in (False, True) if constants["STILL"] else (True,):
        run(
            rotations.rows_grad_kernel, (programs, G, 1), {**tensors, "dq": dq, "dk": dk, "dw": dw, **made},
            (*B.stride()[:3], *C.stride()[:3], T, blocks), constants | {"TURNS": turns}, warps,
        )  # fmt: skip
    found: dict[str, Optional] = {name: made[f"d{name}"] for name in ("b", "c")}
    found["gamma"], found["eta"] = made["dweights"].unbind(-1)
    biases = {name: bias for name in ("b_bias", "c_bias") if (bias := given[name]) is not None}
    if biases:
        both = dict(zip(("b_bias", "c_bias"), made["dbiases"].sum(0).unbind(1), strict=True))
        found |= {name: both[name].to(bias.dtype) for name, bias in biases.items()}
    return found


def rows(
    B: Tensor, C: Tensor, B_bias: Optional, C_bias: Optional, turned: Tensor, arrived: Optional, until: Optional,
    gamma: Tensor, eta: Tensor, D: Optional, pairwise: bool,
) -> Rows:  # fmt: skip
    """Queries R(C + C_bias) and keys (gamma + eta) R(B + B_bias), whose pairs lie side by side; and
    w = D + gamma <B + B_bias, C + C_bias>, by which tokens have their own products: the engine leaves these out
    (`strict`).

    Args:
        B, C: [B, T, G, K]; biases [H, K] or None.
        turned: [B, T, H, S] in float32, by how many turns R rotates; like `arrived` it has no gradient from here.
        arrived: [B, H, S] more turns, of the first `until` tokens ([] in int64), or of all of them; or None.
        gamma, eta: [B, T, H] in float32.
        D: [H] or None.
        pairwise: pairs are channels 2 i and 2 i + 1; else i and i + K / 2.
    """
    untransformed(_NAME, IN_PYTORCH)
    B, C = (z if z.stride(-1) == 1 else z.contiguous() for z in (B, C))
    B_bias, C_bias, arrived, D = (None if z is None else z.contiguous() for z in (B_bias, C_bias, arrived, D))
    inputs = B, C, B_bias, C_bias, turned.contiguous(), arrived, until, gamma.contiguous(), eta.contiguous()
    return Rows(*_Rows.apply(not pairwise, D, *inputs))
