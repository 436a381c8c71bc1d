"""Launches of Triton kernels: what a call launches is worked out once, compiled side by side, and run by addresses."""
