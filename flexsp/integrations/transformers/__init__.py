"""Language models of Hugging Face transformers, trained on sequences that are cut over ranks."""

from typing import TYPE_CHECKING, Any

from flexsp.integrations.transformers.batch import Shard, shard
from flexsp.integrations.transformers.forwards import restore
from flexsp.integrations.transformers.parallelized import parallelize
from flexsp.integrations.transformers.scores import log_probs

if TYPE_CHECKING:
    from flexsp.integrations.transformers.trainer import SequenceParallelTrainer

__all__ = ["SequenceParallelTrainer", "Shard", "log_probs", "parallelize", "restore", "shard"]


def __getattr__(name: str) -> Any:
    if name != "SequenceParallelTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flexsp.integrations.transformers import trainer  # imports accelerate

    return trainer.SequenceParallelTrainer
