"""How a token changes the state. Each function returns a component for FlexLinearAttention.

S' = e^{g_t} S_{t-1} is the decayed state, and o_t = scale q_t S_t. Initial and final states are [N, H, K, V], where
nothing else is said; else one matrix [N, H, K + rows, V + columns], the state first. Where `feature_map.rope` says so,
one more column at the end holds an angle.
"""

from __future__ import annotations

from flexsp.exceptions import check_integer, check_number
from flexsp.grammar.objectives import (
    Contrastive,
    DeltaRows,
    DeltaSteps,
    Information,
    Rows,
    Spectral,
    TemporalDifference,
    Transition,
)

__all__ = [
    "Transition", "contrastive", "delta_rule", "information", "one_step_gd", "preconditioned_gd", "spectral",
    "temporal_difference",
]  # fmt: skip


def one_step_gd(mimo_rank: int = 1) -> Transition:
    """S_t = S' + k_t v_t^T: one gradient step of -<k S, v>.

    With ``mimo_rank`` R > 1 (Mamba-3's MIMO, Lahoti et al. 2026) q and k are [B, T, R, H, K], the call's ``mimo_x``
    [H, R, V] holds factors of v, a token writes the sum over j of k^(j) (mimo_x^(j) v)^T, row j of q reads o^(j), and
    outputs are [B, T, R, H, V]. Under ``sp`` the gradient of ``mimo_x`` is this rank's share. Not with a gate for each
    key channel.

    With ``discretization="trapezoidal"`` of `decay.gated` or `decay.exponential` the state is [N, H, K + 1, V + R]: R
    columns with the last token's keys, with features, and a row with its v; the corner is 0 and is not read.
    """
    rank = check_integer("mimo_rank", mimo_rank, least=1)
    return Rows("one_step_gd", ("mimo_x",) if rank > 1 else (), rank)


def delta_rule(steps: int = 1, mimo_rank: int = 1) -> Transition:
    """S_t = S' + beta_t k_t (v_t - k_t S')^T; the call's ``beta`` is [B, T, H].

    Keys should have length 1 and beta lie in 0..2, else the state grows.

    With ``steps`` n > 1 (Siems et al. 2025, DeltaProduct) k is [B, T, n, H, K], v [B, T, n, H, V] and beta
    [B, T, n, H]: a token decays the state once, takes such a step for each of its keys in turn, and is read after the
    last one. Not with `feature_map.rope`.

    With ``mimo_rank`` R > 1 q and k are [B, T, R, H, K], and the call's ``mimo_x`` [H, R, V] holds factors of v, as in
    `one_step_gd`: a token decays the state once and takes a step for each row j of k in turn, with the value
    mimo_x^(j) v and the token's beta. Then each row of q reads the state; outputs are [B, T, R, H, V]. It runs as a
    delta rule of 2 R - 1 rows a token. Under ``sp`` the gradient of ``mimo_x`` is this rank's share. Not beside several
    ``steps``.
    """
    n, rank = check_integer("steps", steps, least=1), check_integer("mimo_rank", mimo_rank, least=1)
    if n > 1 and rank > 1:
        raise NotImplementedError(f"transition.delta_rule(steps={n}, mimo_rank={rank}): only one may be above 1")
    if rank > 1:
        return DeltaRows(rank=rank)
    return Transition("delta_rule", ("beta",)) if n == 1 else DeltaSteps(steps=n)


def preconditioned_gd(
    preconditioner: str = "diagonal", at: str = "read", eps: float = 1e-6, mimo_rank: int = 1
) -> Transition:
    """One gradient step divided by the running sum of squared keys, P_t = e^{g_t} P_{t-1} + k_t^2 [K].

    The diagonal approximation of what regression divides by (Wang et al. 2025, Test-time regression, arXiv 2501.12352).
    ``at="read"``: S_t = S' + k_t v_t^T, o_t = scale (q_t / (P_t + eps)) S_t. ``at="write"``: S_t = S' + eta_t
    (k_t / (P_t + eps)) v_t^T with the call's ``eta`` [B, T, H]. P decays as the state does, and its terms have the
    weights of what a token writes: dt_t of an exponential decay, and with the trapezoidal rule those of both its terms
    (not with ``at="write"``). With several rows a token (``mimo_rank``, see `one_step_gd`) their squares add up. Keys
    come with features: those that `feature_map.rope` has turned are squared.

    P is the last column of the state, [N, H, K, V + 1], with the trapezoidal rule [N, H, K + 1, V + R + 1].
    """
    if preconditioner != "diagonal":
        raise NotImplementedError(
            f"transition.preconditioned_gd(preconditioner={preconditioner!r}): only 'diagonal' is there"
        )
    if at not in ("read", "write"):
        raise ValueError(f"at: expected 'read' or 'write', got {at!r}")
    rank = check_integer("mimo_rank", mimo_rank, least=1)
    inputs = (*(("eta",) if at == "write" else ()), *(("mimo_x",) if rank > 1 else ()))
    return Rows("preconditioned_gd", inputs, rank, eps=check_number("eps", eps, above=0), at=at)


def spectral() -> Transition:
    """S_t = e^{g_t} R(theta_t) S_{t-1} R'(psi_t)^T + k_t v_t^T: rotations of the state from both sides.

    R turns the pairs of key channels (2 i, 2 i + 1) by the call's ``theta`` [B, T, H, K/2], R' those of value channels
    by its ``psi`` [B, T, H, V/2], both in radians; K and V are even. Rotations that commute stand for those of a
    singular value decomposition, whose gradient is not defined where singular values are equal. Not with a gate for
    each key channel, nor with `feature_map.rope`, which is such a rotation itself. Inputs in half precision are
    computed in float32: gradients of theta and psi are sums over all later tokens, in which roundings of rows would
    add up.
    """
    return Spectral()


def contrastive(feedback: str = "chunk_lagged", block: int = 64, temperature: float = 1.0) -> Transition:
    """S_t = S' + eta_t k_t (v_t - vbar_t)^T: tokens write what tells their value from those that the state expects.

    One step on log softmax of the logits l_tj = k_t S_c v_j / temperature, as in InfoNCE (van den Oord et al. 2018,
    arXiv 1807.03748), where S_c is the state that enters the ``block`` of tokens of which t is one (``feedback``
    "chunk_lagged", the only one there): vbar_t = sum_j p_tj v_j over the block's tokens j <= t, and a candidate of
    value 0 and logit 0, without which the first token of a block would write nothing. The call's ``eta`` is [B, T, H].

    Blocks are counted from the start of the sequence, of each document where packed, and of each call, so continue a
    state only after whole blocks. Under ``sp`` shards must start on edges of blocks, else ValueError. The update is not
    affine in the state: ranks run one after the other, and there are no kernels, so a call on a GPU raises NotAvailable
    unless ``fallback="pytorch"``.
    """
    if feedback != "chunk_lagged":
        raise NotImplementedError(f"transition.contrastive(feedback={feedback!r}): only 'chunk_lagged' is there")
    above_zero = check_number("temperature", temperature, above=0)
    return Contrastive(block=check_integer("block", block, least=1), temperature=above_zero)


def temporal_difference(discount: float = 0.0) -> Transition:
    """S_t = S' + eta_t k_{t-1} (v_t + discount k_t S' - k_{t-1} S')^T: a delta rule with the key of the token before.

    Sutton 1988, Learning to predict by the methods of temporal differences: k_{t-1} predicts v_t, and what k_t will be
    worth, discounted. k_{t-1} has the features of its token and is 0 at the start of a sequence or document, whose
    first token writes nothing. The call's ``eta`` is [B, T, H]. With ``discount`` 0 states stay bounded for keys of
    length 1 and eta of 0..2; with others they may grow, so keep a decay.

    The state is [N, H, K, V + 1], the last column the last token's key.
    """
    return TemporalDifference(discount=check_number("discount", discount))


def information(eps: float = 1.0) -> Transition:
    """S_t = S' + gain_t (v_t - k_t S')^T: a Kalman filter in information form whose precisions are kept a channel.

    lam'_t = e^{g_t} lam_{t-1}, p_t = 1 / (lam'_t + eps), gain_t = eta_t p_t k_t / (1 + sum_d p_td k_td^2),
    lam_t = lam'_t + k_t^2. ``eps`` is the precision of a channel that has seen nothing; the call's ``eta`` [B, T, H]
    lies in 0..1. Without the sum in the gain states would not be bounded.

    The state is [N, H, K, V + 1], the last column lam.
    """
    return Information(eps=check_number("eps", eps, above=0))
