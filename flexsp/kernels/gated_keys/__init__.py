"""Kernels of gates for each key channel: what goes before the walks over states, and the gradients behind them."""
