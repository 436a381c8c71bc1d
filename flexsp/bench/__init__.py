"""Benchmarks behind `flexsp bench`: one timing helper, the operator and weak-scaling runs, their tables and pictures.

The top of the import tree: it may import every other room, and no other room imports it (the command line does so
only inside the functions that run a benchmark).
"""
