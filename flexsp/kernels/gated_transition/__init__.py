"""Kernels of gates for each key channel and a transition of rank one that reads the state before its decay (RWKV-7)."""
