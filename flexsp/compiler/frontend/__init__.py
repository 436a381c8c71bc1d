"""The three functions as graphs: their inputs, traces and checks, and how they run in PyTorch."""
