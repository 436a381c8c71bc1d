"""The engines: fused chunk kernels and their PyTorch references."""
