"""Layers and language models of flash-linear-attention, on sequences that are cut over ranks."""

from flexsp.integrations.fla.parallelized import parallelize
from flexsp.integrations.transformers.batch import Shard, shard
from flexsp.integrations.transformers.forwards import restore

__all__ = ["Shard", "parallelize", "restore", "shard"]
