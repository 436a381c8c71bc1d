"""The selective scan of Mamba-1: a state of N numbers a channel, each with its own decay."""
