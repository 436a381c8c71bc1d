"""Softmax attention over ranks, for hybrid models: a function, and the layer `flexsp.nn.Attention`.

`flexsp/nn/attention/` computes softmax layers of hybrid models over the same shards. Softmax attention has no state
that a rank could pass on, so ranks exchange heads or keys. Both ways use one differentiable exchange of rows between
all ranks (`exchange_rows` in `flexsp/comm/collectives.py`), whose backward pass is the same exchange with its counts
swapped. The rows are packed and unpacked by ordinary PyTorch, so autograd adds up the gradients of a key that several
ranks read.

| way | rows to a rank | then | rows back |
|---|---|---|---|
| heads | queries, keys and values of its heads | it attends to whole sequences | outputs of its heads |
| keys | keys and values that its queries may see | it attends from its queries to these | none |

The exchange of keys and the attention to them are one checkpoint: a rank saves only its own shard, and receives the
keys again in the backward pass. The exchange of heads needs none, since H/R heads of T tokens take as much memory as H
heads of T/R tokens.

With causality, windows and documents a query sees one contiguous range of keys. So a mask is the first and the last key
of every query, and neither decreases from one query to the next (`Sight.ranges` in `flexsp/nn/attention/local.py`). The
blocks of queries in PyTorch (`flexsp/nn/attention/blocks.py`) and the block mask of flex_attention follow from that.
"""

from flexsp.nn.attention.function import scaled_dot_product_attention
from flexsp.nn.attention.layer import Attention, AttentionCache

__all__ = ["Attention", "AttentionCache", "scaled_dot_product_attention"]
