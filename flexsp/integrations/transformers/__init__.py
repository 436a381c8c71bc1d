"""Language models of Hugging Face transformers, trained on sequences that are cut over ranks."""

from flexsp.integrations.transformers.batch import Shard, shard
from flexsp.integrations.transformers.forwards import restore
from flexsp.integrations.transformers.model import parallelize

__all__ = ["Shard", "parallelize", "restore", "shard"]
