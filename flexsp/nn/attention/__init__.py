"""Softmax attention over ranks, for hybrid models: a function, and the layer `flexsp.nn.Attention`.

`flexsp/nn/attention/` computes softmax layers of hybrid models over the same shards. It has no state to hand on:
ranks exchange heads or keys. Both are built of one differentiable exchange of rows between all ranks (`exchange_rows`
in `flexsp/comm/collectives.py`), whose backward pass is the same exchange with its counts swapped. What goes into the
rows and comes out of them is ordinary PyTorch, so autograd adds up the gradients of a key that several ranks have
read.

| way | rows to a rank | then | rows back |
|---|---|---|---|
| heads | queries, keys and values of its heads | it attends to whole sequences | outputs of its heads |
| keys | keys and values that its queries may see | it attends from its queries to these | none |

Where keys are exchanged, the exchange and the attention are one checkpoint: a rank keeps its own shard only, and gets
the keys once more in the backward pass. Heads need no such thing, since H/R heads of T tokens are as large as H heads
of T/R.

Causality, windows and documents each leave a token one stretch of the sequence, so a mask is the first and the last
key of every query, and neither ever goes back from one query to the next (`Sight.ranges` in
`flexsp/nn/attention/local.py`). The blocks of queries in PyTorch (`flexsp/nn/attention/blocks.py`) and the block mask
of flex_attention follow from that.
"""

from flexsp.nn.attention.function import scaled_dot_product_attention
from flexsp.nn.attention.layer import Attention, AttentionCache

__all__ = ["Attention", "AttentionCache", "scaled_dot_product_attention"]
