"""`flexsp compile`: the kernels of training steps, compiled before the first step needs them, on any machine."""
