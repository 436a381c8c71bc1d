"""flexsp: train linear-attention and state-space layers on sequences longer than one GPU holds."""

from flexsp import integrations, nn, ops
from flexsp.comm.documents import seq_idx_to_cu_seqlens
from flexsp.comm.group import SequenceParallel, current_sp, sequence_parallel
from flexsp.exceptions import (
    FlexspError,
    HeapTooSmall,
    NotAvailable,
    NotExact,
    PeerMismatch,
    PeerTimeout,
    UncoveredWarning,
    checks_wanted,
    kernels_on_cpu,
)  # fmt: skip
from flexsp.launch.bootstrap import init_sequence_parallel
from flexsp.nn import SequenceParallelLA, verify

__version__ = "0.1.0"

_ = checks_wanted(), kernels_on_cpu()  # a misspelt variable is refused here, even where nothing reads it later
del _, checks_wanted, kernels_on_cpu

__all__ = [
    "FlexspError",
    "HeapTooSmall",
    "NotAvailable",
    "NotExact",
    "PeerMismatch",
    "PeerTimeout",
    "SequenceParallel",
    "SequenceParallelLA",
    "UncoveredWarning",
    "current_sp",
    "init_sequence_parallel",
    "integrations",
    "nn",
    "ops",
    "seq_idx_to_cu_seqlens",
    "sequence_parallel",
    "verify",
]
