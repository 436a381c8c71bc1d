"""Log gates and weights of tokens' products, of step sizes and of what the trapezoidal rule is weighted by."""

from __future__ import annotations

import triton
import triton.language as tl

from flexsp.runtime.launch import begin


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _places(t_sb, t_st, t_sh, batch, t, h):
    return batch * t_sb + t[:, None] * t_st + h[None, :] * t_sh


@triton.jit(do_not_specialize=["T", "blocks"])
def steps_kernel(
    dt, A, trap, gate, gamma, eta, dt_sb, dt_st, dt_sh, A_sb, A_st, A_sh, l_sb, l_st, l_sh, T, blocks,
    H: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """gate = dt A, gamma = l dt and eta = (1 - l) dt with l = sigmoid(trap): [batch, T, H] in fp32."""
    begin(PDL)
    n = tl.program_id(0).to(tl.int64)
    batch = n // blocks
    t = (n % blocks) * BT + tl.arange(0, BT)
    h = tl.program_id(1).to(tl.int64) * BH + tl.arange(0, BH)
    there = (t < T)[:, None] & (h < H)[None, :]
    step = tl.load(dt + _places(dt_sb, dt_st, dt_sh, batch, t, h), mask=there, other=0.0).to(tl.float32)
    slow = tl.load(A + _places(A_sb, A_st, A_sh, batch, t, h), mask=there, other=0.0).to(tl.float32)
    x = tl.load(trap + _places(l_sb, l_st, l_sh, batch, t, h), mask=there, other=0.0).to(tl.float32)
    to = (batch * T + t)[:, None] * H + h[None, :]
    tl.store(gate + to, step * slow, mask=there)
    tl.store(gamma + to, _sigmoid(x) * step, mask=there)
    tl.store(eta + to, _sigmoid(-x) * step, mask=there)


@triton.jit(do_not_specialize=["T", "blocks"])
def steps_grad_kernel(
    dt, A, trap, dgate, dgamma, deta, ddt, dA, dtrap, dt_sb, dt_st, dt_sh, A_sb, A_st, A_sh, l_sb, l_st, l_sh,
    g_sb, g_st, g_sh, u_sb, u_st, u_sh, e_sb, e_st, e_sh, T, blocks,
    H: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The gradients of `steps_kernel`, [batch, T, H]."""
    begin(PDL)
    n = tl.program_id(0).to(tl.int64)
    batch = n // blocks
    t = (n % blocks) * BT + tl.arange(0, BT)
    h = tl.program_id(1).to(tl.int64) * BH + tl.arange(0, BH)
    there = (t < T)[:, None] & (h < H)[None, :]
    step = tl.load(dt + _places(dt_sb, dt_st, dt_sh, batch, t, h), mask=there, other=0.0).to(tl.float32)
    slow = tl.load(A + _places(A_sb, A_st, A_sh, batch, t, h), mask=there, other=0.0).to(tl.float32)
    x = tl.load(trap + _places(l_sb, l_st, l_sh, batch, t, h), mask=there, other=0.0).to(tl.float32)
    of_gate = tl.load(dgate + _places(g_sb, g_st, g_sh, batch, t, h), mask=there, other=0.0)
    of_gamma = tl.load(dgamma + _places(u_sb, u_st, u_sh, batch, t, h), mask=there, other=0.0)
    of_eta = tl.load(deta + _places(e_sb, e_st, e_sh, batch, t, h), mask=there, other=0.0)
    share, rest = _sigmoid(x), _sigmoid(-x)
    to = (batch * T + t)[:, None] * H + h[None, :]
    tl.store(ddt + to, (of_gate * slow + of_gamma * share + of_eta * rest).to(ddt.dtype.element_ty), mask=there)
    tl.store(dA + to, (of_gate * step).to(dA.dtype.element_ty), mask=there)
    tl.store(dtrap + to, ((of_gamma - of_eta) * step * share * rest).to(dtrap.dtype.element_ty), mask=there)
