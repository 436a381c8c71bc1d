"""Kernels of Mamba-3 around the engine for scalar decays: sums of angles, rotations, own values."""
