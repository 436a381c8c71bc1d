"""flexsp: train linear-attention and state-space layers on sequences longer than one GPU holds."""
