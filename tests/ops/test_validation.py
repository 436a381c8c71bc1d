"""Bad input: a ValueError that names the argument, what was expected and what came, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flexsp import nn as layers
from flexsp import ops
from flexsp.comm.group import SequenceParallel, sequence_parallel
from flexsp.testing.cases import CASES, PROGRAM_CASES, Shape
from tests.harness.layers import OF_EACH

B, T, H, K, V = 2, 8, 4, 6, 5


def qkv(**changes: Any) -> dict[str, Any]:
    made = {"q": torch.randn(B, T, H, K), "k": torch.randn(B, T, H, K), "v": torch.randn(B, T, H, V)}
    return {**made, **changes}


def packed(**changes: Any) -> dict[str, Any]:
    return {**{name: x[:1] for name, x in qkv().items()}, "cu_seqlens": torch.tensor([0, 3, T]), **changes}


def ssd(**changes: Any) -> dict[str, Any]:
    made = {
        "x": torch.randn(B, T, H, V),
        "dt": torch.rand(B, T, H),
        "A": -torch.rand(H),
        "B": torch.randn(B, T, 2, K),
        "C": torch.randn(B, T, 2, K),
    }
    return {**made, **changes}


QKV = [
    (qkv(q=torch.randn(T, H, K)), r"q: expected a 4-D tensor \[B, T, H, K\], got shape \[8, 4, 6\]"),
    (qkv(q=[1.0]), r"q: expected a tensor \[B, T, H, K\], got list"),
    (qkv(q=torch.ones(B, T, H, K, dtype=torch.int64)), r"q: expected dtype float16 or .*float64, got torch.int64"),
    (qkv(k=torch.randn(B, T, H, K + 1)), r"k: expected shape \[B, T, H, K\] = \[2, 8, 4, 6\], got \[2, 8, 4, 7\]"),
    (qkv(k=torch.randn(B, T, H, K).double()), "k: expected dtype float32, got torch.float64"),
    (qkv(v=torch.randn(B, T + 1, H, V)), r"v: expected shape \[B, T, H, V\] = \[2, 8, 4, V\], got \[2, 9, 4, 5\]"),
    (qkv(v=torch.randn(B, T, H, V, device="meta")), "v: expected a tensor .* with values, got one on the meta device"),
    (qkv(v=torch.randn(B, T, H, V).double()), "v: expected dtype float32, got torch.float64"),
    (qkv(q=torch.randn(B, T, H, 257), k=torch.randn(B, T, H, 257)), r"q: expected a last dimension of 1..256, got 257"),
    (qkv(v=torch.randn(B, T, H, 513)), r"v: expected a last dimension of 1..512, got 513"),
    (qkv(v=torch.randn(B, T, H, 0)), r"v: expected a last dimension of 1..512, got 0"),
    (qkv(q=torch.randn(0, T, H, K), k=torch.randn(0, T, H, K), v=torch.randn(0, T, H, V)), "q: expected at least one"),
    (qkv(scale="1"), "scale: expected a finite number, got str"),
    (qkv(sp=3), "sp: expected a SequenceParallel, None or False, got int"),
    (qkv(initial_state=torch.zeros(B, H, V, K)), r"initial_state: expected shape \[N, H, K, V\] = \[2, 4, 6, 5\]"),
    (qkv(initial_state=torch.zeros(B, H, K, V).double()), "initial_state: expected dtype float32, got torch.float64"),
    (qkv(initial_state=torch.zeros(B, H, K, V, device="meta")), "initial_state: expected .* with values, got one on"),
    (qkv(cu_seqlens=torch.tensor([0, T])), r"q: expected batch size 1 with cu_seqlens .*, got 2"),
    (qkv(cu_seqlens_cpu=torch.tensor([0, T])), r"cu_seqlens_cpu: expected None without cu_seqlens, got shape \[2\]"),
    (packed(cu_seqlens=torch.tensor([[0, T]])), r"cu_seqlens: expected a 1-D tensor \[N \+ 1\], got shape \[1, 2\]"),
    (packed(cu_seqlens=torch.tensor([0.0, T])), "cu_seqlens: expected dtype int32 or int64, got torch.float32"),
    (packed(cu_seqlens=torch.tensor([0])), r"cu_seqlens: expected at least two entries .*, got 1"),
    (packed(cu_seqlens=torch.tensor([1, T])), "cu_seqlens: expected a first entry of 0, got 1"),
    (packed(cu_seqlens=torch.tensor([0, 6, 4, T])), "cu_seqlens: expected non-decreasing .* 6 then 4 at position 2"),
    (packed(cu_seqlens=torch.tensor([0, 3, T + 1])), r"cu_seqlens: expected a last entry of at most 8 .*, got 9"),
    (packed(cu_seqlens=torch.tensor([0, T], device="meta")), "cu_seqlens: expected .* with values, got one on"),
    (packed(cu_seqlens_cpu=torch.tensor([0, T])), r"cu_seqlens_cpu: expected shape \[N \+ 1\] = \[3\], got \[2\]"),
    (packed(cu_seqlens_cpu=torch.tensor([0, 9, T])), "cu_seqlens_cpu: expected non-decreasing entries, got 9 then 8"),
    (packed(initial_state=torch.zeros(1, H, K, V)), r"initial_state: expected shape .* got \[1, 4, 6, 5\]"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), QKV)
@pytest.mark.parametrize("op", [ops.chunk_simple_gla, ops.chunk_retention, ops.chunk_linear_attn])
def test_queries_keys_values(op: Any, arguments: dict[str, Any], message: str) -> None:
    if op is ops.chunk_linear_attn:
        arguments = {**arguments, "normalize": False}
    with pytest.raises(ValueError, match=f"^{message}"):
        op(**arguments)


@pytest.mark.parametrize("op", [ops.chunk_simple_gla, ops.recurrent_simple_gla])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (qkv(g=torch.zeros(B, T, H, K)), r"g: expected shape \[B, T, H\] = \[2, 8, 4\], got \[2, 8, 4, 6\]"),
        (qkv(g=torch.full((B, T, H), 0.25)), "g: expected natural-log gates <= 0, got a largest value of 0.25"),
        (qkv(g=torch.zeros(B, T, H).double()), "g: expected dtype float32, got torch.float64"),
        (qkv(g_gamma=torch.zeros(B)), r"g_gamma: expected shape \[H\] = \[4\], got \[2\]"),
        (qkv(g_gamma=torch.ones(H)), "g_gamma: expected natural-log gates <= 0, got a largest value of 1"),
        (qkv(g=torch.zeros(B, T, H), g_gamma=torch.zeros(H)), "g_gamma: expected None when g is given, got both"),
    ],
)
def test_gates(op: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        op(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer_idx": 4, "num_layers": 4}, "layer_idx: expected 0..3, an integer, got 4"),
        ({"layer_idx": -1, "num_layers": 4}, "layer_idx: expected 0..3, an integer, got -1"),
        ({"layer_idx": 0, "num_layers": 0}, "num_layers: expected an integer >= 1, got 0"),
    ],
)
def test_lightning_layers(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        ops.chunk_lightning_attn(**qkv(), **arguments)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (torch.zeros(B, H, K, V), r"initial_state: expected a pair \(S .*\) with normalize=True, got Tensor"),
        ((torch.zeros(B, H, K, V),), "initial_state: expected a pair"),
        ((torch.zeros(B, H, K, V), torch.zeros(B, H, K, 1)), r"initial_state\[1\]: expected shape \[N, 1, H, K\]"),
        ((torch.zeros(B, H, K), torch.zeros(B, 1, H, K)), r"initial_state\[0\]: expected shape \[N, H, K, V\]"),
    ],
)
def test_normalized_state(state: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        ops.chunk_linear_attn(**qkv(), initial_state=state)


def test_plain_state() -> None:
    pair = (torch.zeros(B, H, K, V), torch.zeros(B, 1, H, K))
    with pytest.raises(ValueError, match=r"^initial_state: expected a tensor .* with normalize=False, got tuple"):
        ops.chunk_linear_attn(**qkv(), initial_state=pair, normalize=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (ssd(x=torch.randn(B, T, H)), r"x: expected a 4-D tensor \[B, T, H, P\]"),
        (ssd(x=torch.randn(B, T, H, 513)), r"x: expected a last dimension of 1..512, got 513"),
        (ssd(dt=torch.rand(B, T)), r"dt: expected shape \[B, T, H\] = \[2, 8, 4\]"),
        (ssd(dt=-torch.ones(B, T, H)), r"dt: expected step sizes >= 0 \(after dt_bias\), got a smallest value of -1"),
        (ssd(dt_bias=-2 * torch.ones(H)), "dt: expected step sizes >= 0"),
        (ssd(A=torch.ones(H)), r"A: expected values <= 0, usually -exp\(A_log\), got a largest value of 1"),
        (ssd(A=-torch.ones(H, K)), r"A: expected shape \[H\] = \[4\], got \[4, 6\]"),
        (
            ssd(B=torch.randn(B, T, 3, K), C=torch.randn(B, T, 3, K)),
            "B: expected a number of groups G that",
        ),
        (ssd(B=torch.randn(B, T + 1, 2, K)), r"B: expected shape \[B, T, G, N\] = \[2, 8, G, N\], got \[2, 9, 2, 6\]"),
        (ssd(B=torch.randn(B, T, K)), r"B: expected a 4-D tensor \[B, T, G, N\]"),
        (
            ssd(B=torch.randn(B, T, 2, 260), C=torch.randn(B, T, 2, 260)),
            "B: expected a last dimension of 1..256",
        ),
        (ssd(C=torch.randn(B, T, 1, K)), r"C: expected shape \[B, T, G, N\] = \[2, 8, 2, 6\], got \[2, 8, 1, 6\]"),
        (ssd(C=torch.randn(B, T, 2, K).double()), "C: expected dtype float32, got torch.float64"),
        (ssd(D=torch.ones(K)), r"D: expected shape \[H\] or \[H, P\] = \[4\], got \[6\]"),
        (ssd(D=torch.ones(H, K)), r"D: expected shape \[H, P\] = \[4, 5\], got \[4, 6\]"),
        (ssd(D=1.0), r"D: expected a tensor \[H\] or \[H, P\], got float"),
        (ssd(dt_bias=torch.ones(1)), r"dt_bias: expected shape \[H\] = \[4\], got \[1\]"),
        (
            ssd(initial_state=torch.zeros(B, H, V, K), state_v_first=False),
            r"initial_state: expected shape \[B, H, N, P\] = \[2, 4, 6, 5\]",
        ),
        (
            ssd(initial_state=torch.zeros(B, H, K, V), state_v_first=True),
            r"initial_state: expected shape \[B, H, P, N\] = \[2, 4, 5, 6\]",
        ),
        (ssd(initial_state=torch.zeros(B, H, V, K)), r"state_v_first: expected True for states \[B, H, P, N\]"),
        (ssd(output_final_state=True), "state_v_first: expected True for states"),
        (ssd(cu_seqlens=torch.tensor([0, T])), "x: expected batch size 1 with cu_seqlens"),
        (ssd(seq_idx=torch.zeros(B, T + 1, dtype=torch.int32)), r"seq_idx: expected shape \[B, T\] = \[2, 8\]"),
        (ssd(seq_idx=torch.zeros(B, T)), "seq_idx: expected dtype int32 or int64, got torch.float32"),
        (
            {k: x[:1] if x.dim() > 2 else x for k, x in ssd().items()}
            | {"cu_seqlens": torch.tensor([0, T]), "seq_idx": torch.zeros(1, T, dtype=torch.int64)},
            "seq_idx: expected None beside cu_seqlens, got both",
        ),
    ],
)
def test_mamba2(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        ops.mamba2_ssd(**arguments)


def test_mamba2_with_states_of_mamba_ssm() -> None:
    given, state = ssd(), torch.randn(B, H, K, V)
    y, final = ops.mamba2_ssd(**given, initial_state=state, output_final_state=True, state_v_first=False)
    turned = ops.mamba2_ssd(**given, initial_state=state.mT, output_final_state=True, state_v_first=True)
    assert torch.equal(y, turned[0]) and torch.equal(final, turned[1].mT)


@pytest.mark.parametrize("shape", [(0, T, H, V), (B, T, 0, V)])
def test_mamba3_of_no_sequence_or_head(shape: tuple[int, ...]) -> None:
    others = dict.fromkeys(("dt", "A", "B", "C", "trap", "angles"), torch.zeros(B, T, H, K))
    with pytest.raises(ValueError, match=r"^x: expected at least one batch row and one head, got \["):
        ops.mamba3(torch.zeros(shape), **others)


def test_mlstm_with_heads_first() -> None:
    """And mlstm_kernels' own call, which has no head_first, is no call."""
    q, k, v = torch.randn(3, 2, 5, 3, 4).unbind(0)
    given = [q, k, v, *torch.randn(2, 2, 5, 3).unbind(0)]
    for op in (ops.chunk_mlstm, ops.recurrent_mlstm):
        want, states = op(*given, head_first=False, return_last_states=True)
        got, others = op(*[x.transpose(1, 2) for x in given], head_first=True, return_last_states=True)
        assert torch.equal(got.transpose(1, 2), want)
        assert all(torch.equal(a, b) for a, b in zip(states, others, strict=True))
        with pytest.raises(TypeError, match="head_first"):
            op(*given)
        with pytest.raises(TypeError, match="positional"):
            op(*given, None, head_first=True)


def test_state_on_a_rank_that_is_not_the_first() -> None:
    sp = SequenceParallel(rank=1, world_size=2)
    with pytest.raises(ValueError, match="^initial_state: expected None on every rank but the first .* on rank 1"):
        ops.chunk_simple_gla(**qkv(), initial_state=torch.zeros(B, H, K, V), sp=sp)
    with pytest.raises(ValueError, match=r"^initial_state\[1\]: expected None"):
        ops.chunk_linear_attn(**qkv(), initial_state=(None, torch.zeros(B, 1, H, K)), sp=sp)


def test_boundaries_that_disagree_with_the_shards() -> None:
    sp = SequenceParallel(rank=1, world_size=2)
    sp.set_lengths([4, T])
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected a last entry of at most 12 .*, got 13"):
        ops.chunk_simple_gla(**packed(cu_seqlens=torch.tensor([0, 13])), sp=sp)
    sp.set_lengths([4, 5])
    with pytest.raises(ValueError, match="expected a shard of 5 tokens"):
        ops.chunk_simple_gla(**packed(), sp=sp)


ALL = CASES | PROGRAM_CASES


def lengths_known(check_calls: bool) -> SequenceParallel:
    """Two ranks of 45 tokens; the other one does not exist, so nothing may be sent."""
    sp = SequenceParallel(rank=1, world_size=2, check_calls=check_calls)
    sp.set_lengths([45, 45])
    return sp


@pytest.mark.parametrize("check_calls", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_ops_refuse_another_length_than_was_set(name: str, check_calls: bool) -> None:
    sp, case = lengths_known(check_calls), ALL[name]
    for T, B in ((90, 2), (44, 2), (60, 1)):
        given = {x: y if y is None else y.float() for x, y in case.make(Shape(B=B, T=T), torch.Generator()).items()}
        bounds = {"cu_seqlens": torch.tensor([0, 7, 90])} if B == 1 else {}
        with pytest.raises(ValueError, match=rf"^rank 1: expected a shard of 45 tokens \(set_lengths\), got {T}"):
            case.op(**given, **case.constants, **bounds, sp=sp)


def test_the_list_of_layers_is_complete() -> None:
    found = {x for x in layers.__all__ if isinstance(made := getattr(layers, x), type) and issubclass(made, nn.Module)}
    wanted = found - {"RMSNorm", "GatedRMSNorm", "SequenceParallelLA"}
    assert wanted == {*OF_EACH}, f"tests/harness/layers.py: expected rows in LAYERS for {sorted(wanted - {*OF_EACH})}"


@pytest.mark.parametrize("name", OF_EACH)
@pytest.mark.parametrize("check_calls", [False, True])
def test_layers_refuse_another_length_than_was_set(name: str, check_calls: bool) -> None:
    cls, options, width = OF_EACH[name]
    layer, sp = cls(**options), lengths_known(check_calls)
    with sequence_parallel(sp):
        for T in (90, 44):
            with pytest.raises(ValueError, match=rf"^rank 1: expected a shard of 45 tokens \(set_lengths\), got {T}"):
                layer(torch.randn(2, T, width))


def test_a_whole_sequence_is_called_one() -> None:
    with pytest.raises(ValueError, match=r"got 90, as many as all ranks have together: cut with sp\.shard$"):
        lengths_known(False).check_shard(90)
    one = SequenceParallel()
    one.set_lengths([8])
    with pytest.raises(ValueError, match=r"expected a shard of 8 tokens \(set_lengths\), got 9$"):
        ops.chunk_simple_gla(**{n: torch.randn(1, 9, H, K) for n in "qkv"}, sp=one)
    ops.chunk_simple_gla(**qkv(), sp=one)


def test_group_on_another_device() -> None:
    with pytest.raises(ValueError, match=r"^sp: expected a group on the inputs' device \(cpu\), got one on meta"):
        ops.chunk_simple_gla(**qkv(), sp=SequenceParallel(device="meta"))


def test_values_are_not_read_where_that_would_synchronise(monkeypatch: pytest.MonkeyPatch) -> None:
    """On other devices than the CPU values are looked at only under FLEXSP_CHECK=1; meta stands in for CUDA here."""
    from flexsp.ops import _validate

    gate = torch.ones(3, device="meta")
    _validate.check_non_positive("g", gate, "gates <= 0")
    monkeypatch.setenv("FLEXSP_CHECK", "1")
    _validate.check_non_positive("g", gate, "gates <= 0")  # meta has no values to read
    assert _validate.readable(torch.ones(1))


def test_boundaries_on_the_cpu_must_be_those_of_the_device() -> None:
    q, k, v = torch.randn(3, 1, 5, 1, 4).unbind(0)
    with pytest.raises(ValueError, match="cu_seqlens_cpu: expected None without cu_seqlens, got a list"):
        ops.chunk_simple_gla(q, k, v, cu_seqlens_cpu=[0, 5])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cu_seqlens_cpu: expected the values of cu_seqlens"):
        ops.chunk_simple_gla(q, k, v, cu_seqlens=torch.tensor([0, 2, 5]), cu_seqlens_cpu=torch.tensor([0, 3, 5]))


def test_autocast_leaves_the_state_alone() -> None:
    q, k, v = torch.randn(3, 1, 80, 2, 8).unbind(0)
    want = ops.chunk_simple_gla(q, k, v, output_final_state=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = ops.chunk_simple_gla(q, k, v, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
