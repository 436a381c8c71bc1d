"""What takes the place of functions of flash-linear-attention, without that library: over two ranks as on one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsp.comm.group import SequenceParallel
from flexsp.exceptions import FlexspError, NotAvailable
from flexsp.integrations.fla import functions, parallelize
from flexsp.integrations.transformers.forwards import replace_forward
from flexsp.nn import Mamba2, SequenceParallelLA
from flexsp.ops import chunk_gated_delta_product, chunk_kda
from flexsp.testing import run_ranks
from tests.attention_oracle import attention_token_loop
from tests.transformers_models import Found, assert_exact

T, BOUNDS = 19, [0, 7, 8, 19]
ONE = SequenceParallel()


def convolved(x: Tensor) -> Tensor:
    module = SimpleNamespace(weight=torch.linspace(-1, 1, 24).double().view(6, 1, 4), bias=None, activation="silu")
    return functions.convolution_forward(pytest.fail, module, x=x, cache=None, output_final_state=False)[0]


def rotated(x: Tensor) -> Tensor:
    module = SimpleNamespace(inv_freq=torch.tensor([0.7, 0.1, 0.01]).double())
    q, k = functions.rotary_forward(pytest.fail, module, x[:, :, None], x[:, :, None], seqlen_offset=0, max_seqlen=3)
    return q[:, :, 0] + k[:, :, 0]


def attended(x: Tensor) -> Tensor:
    q, k = x.unflatten(-1, (3, 2)), x[..., :2].unsqueeze(2)
    return functions.flash_attention(q, k, k, causal=True, window_size=(3, 0)).flatten(2)


def recurrent(x: Tensor) -> Tensor:
    q, run = x.unflatten(-1, (2, 3)), functions.over_ranks(chunk_kda)
    o, _ = run(q=q, k=q, v=q, g=-q.square(), beta=q[..., 0].sigmoid(), state_v_first=True, cu_seqlens=None)
    return o.flatten(2)


def product(x: Tensor) -> Tensor:
    """Of three steps a token, where the first has the gate and the last the query."""
    heads = x.unflatten(-1, (2, 3))
    steps, gate = heads.repeat_interleave(3, dim=1), -heads[..., 0].square()
    query = torch.stack([0 * heads, 0 * heads, heads], 2).flatten(1, 2)
    o, _ = functions.recurrent_product(3)(
        q=query, k=steps, v=steps, g=torch.stack([gate, 0 * gate, 0 * gate], 2).flatten(1, 2),
        beta=steps[..., 0].sigmoid(), initial_state=None, output_final_state=False, cu_seqlens=None,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return o[:, 2::3].flatten(2)


FUNCTIONS = {
    "convolved": convolved, "rotated": rotated, "attended": attended, "recurrent": recurrent, "product": product,
}  # fmt: skip


def _outputs(sp: Any, x: Tensor, dy: Tensor, bounds: Tensor | None) -> Found:
    mine, found = sp.shard(x), {}
    for name, function in FUNCTIONS.items():
        mine = mine.detach().requires_grad_()
        with functions.on_ranks(sp, bounds):
            y = function(mine)
        found[name] = y.detach()
        found[f"{name}, gradient"] = torch.autograd.grad(y, mine, sp.shard(dy))[0]
    return found


def _cut(sp: Any, x: Tensor, dy: Tensor, bounds: Tensor | None) -> Found:
    sp.set_lengths([17, 2])
    return _outputs(sp, x, dy, bounds)


def side_by_side(parts: list[Found]) -> Found:
    return {name: torch.cat([found[name] for found in parts], 1) for name in parts[0]}


@pytest.mark.parametrize("packed", [False, True], ids=["one text", "documents"])
def test_two_ranks_equal_one(packed: bool) -> None:
    """One call for each document, too."""
    x, dy = torch.randn(2, 1, T, 6, dtype=torch.float64).unbind(0)
    x, bounds = x / 2, torch.tensor(BOUNDS) if packed else None
    per_rank = run_ranks(_cut, 2, x, dy, bounds)
    edges = BOUNDS if packed else [0, T]
    alone = [_outputs(ONE, x[:, a:b], dy[:, a:b], None) for a, b in zip(edges, edges[1:], strict=False)]
    assert_exact(side_by_side(per_rank), side_by_side(alone))


def test_they_do_what_they_replace() -> None:
    x = torch.randn(1, T, 6, dtype=torch.float64)
    with functions.on_ranks(ONE, None):
        got = {name: function(x) for name, function in FUNCTIONS.items()}
    weight = torch.linspace(-1, 1, 24).double().view(6, 1, 4)
    want = {"convolved": F.silu(F.conv1d(F.pad(x.mT, (3, 0)), weight, groups=6)).mT}
    pairs = torch.view_as_complex(torch.stack([x[..., :3], x[..., 3:]], -1))
    angles = torch.arange(T).double()[:, None] * torch.tensor([0.7, 0.1, 0.01]).double()
    want["rotated"] = 2 * torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).mT.flatten(2)
    q, k = x.unflatten(-1, (3, 2)), x[..., :2].unsqueeze(2)
    want["attended"] = attention_token_loop(q, k, k, scale=2**-0.5, window=4).flatten(2)
    heads = x.unflatten(-1, (2, 3))
    beta = heads[..., 0].sigmoid()
    want["recurrent"] = chunk_kda(heads, heads, heads, -heads.square(), beta)[0].flatten(2)
    steps, gate = heads.repeat_interleave(3, dim=1), -heads[..., 0].square()
    want["product"] = chunk_gated_delta_product(
        heads, steps, steps, gate, beta.repeat_interleave(3, dim=1), 3, use_qk_l2norm_in_kernel=True
    )[0].flatten(2)
    assert_exact(got, want)


def test_mamba() -> None:
    """The forward that is flexsp's own, on the modules of a `flexsp.nn.Mamba2`."""
    layer, x = Mamba2(12, head_dim=4, state_size=5, n_groups=2).double(), torch.randn(2, 9, 12, dtype=torch.float64)
    layer.__dict__ |= {
        "intermediate_size": 24, "ssm_state_size": 5, "conv_dim": 44, "act": F.silu, "rmsnorm": True,
        "dt_limit": (0.0, torch.inf), "_get_D": lambda: layer.D,
    }  # fmt: skip
    layer.A_log.data = layer.A_log.data.float().double()
    with functions.on_ranks(ONE, None):
        y, *rest = functions.mamba2_forward(layer, x)
    torch.testing.assert_close(y, layer(x), rtol=1e-6, atol=1e-6)  # A is rounded to float32, as it is in that library
    assert rest == [None, None]


def test_the_wrapper_takes_layers_that_run_over_ranks() -> None:
    """And leaves them, and what is inside, as they are."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Conv1d(2, 2, 3)))
    with pytest.raises(ValueError, match=r"Conv1d at '1\.0'"):
        SequenceParallelLA(model, ONE)
    replace_forward(model[1], lambda original, module, x: 2 * x, over_ranks=True)
    x = torch.randn(3, 2)
    assert torch.equal(SequenceParallelLA(model, ONE)(x), 2 * model[0](x))


def test_without_a_mixer() -> None:
    """Convolutions and rotary embeddings run their own forward, and functions cannot run."""
    assert functions.convolution_forward(lambda module, x: (module, x), 1, 2) == (1, 2)
    assert functions.rotary_forward(lambda module, x: (module, x), 1, 2) == (1, 2)
    with pytest.raises(FlexspError, match="a mixer's function was called outside of its forward"):
        functions.causal_conv1d(torch.randn(1, 2, 3), torch.randn(3, 4))


def test_refused_arguments() -> None:
    x = torch.randn(1, 4, 2, 3)
    with functions.on_ranks(ONE, None):
        for given in ({"initial_state": x}, {"output_final_state": True}):
            with pytest.raises(NotAvailable, match="a sequence that is cut over ranks takes no cache"):
                functions.over_ranks(chunk_kda)(q=x, k=x, v=x, g=-x.square(), beta=x[..., 0].sigmoid(), **given)
        with pytest.raises(TypeError, match="newer"):
            functions.over_ranks(chunk_kda)(q=x, k=x, v=x, g=-x.square(), beta=x[..., 0].sigmoid(), newer=1)
        with pytest.raises(ValueError, match="mask: expected None"):
            functions.causal_conv1d(x[0], torch.randn(3, 4), mask=x)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="seqlen_offset: expected 0"):
            functions.rotary_forward(pytest.fail, SimpleNamespace(inv_freq=x), x, x, seqlen_offset=2)
    with pytest.raises(NotAvailable, match="Linear is not among the models and layers that can be cut over ranks: "):
        parallelize(nn.Linear(2, 2), ONE)
