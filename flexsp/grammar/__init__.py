"""Linear-attention variants put together from components: a decay, a feature map, a transition, a mask."""

from flexsp.grammar import decay, feature_map, transition
from flexsp.grammar.flex_linear_attention import FlexLinearAttention

__all__ = ["FlexLinearAttention", "decay", "feature_map", "transition"]
