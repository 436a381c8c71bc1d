"""Launches of Triton kernels. Work on a call is done once; later calls like it only fill in addresses.

ptxas is NVIDIA's assembler, the last step of Triton's compilation. Release 12.8, which Triton 3.6 uses for Hopper
GPUs, miscompiles some kernels with small matrix products: Gated DeltaNet with K = 20 got a wrong dk, and with K = 20
and V = 64 it accessed memory that was not its own. Releases 12.9 and 13.0 do not, nor does 12.8 without its
optimisations. So `flexsp/runtime/launch.py` has every kernel for Hopper assembled by the newest ptxas that it finds:
Triton's own, the one that Triton brings for Blackwell GPUs (12.9), that of the CUDA toolkit, or that of the package
nvidia-cuda-nvcc. Only the threads that compile for flexsp use it; others keep Triton's own. Where all of them are too
old, generated kernels are not used on Hopper, and a warning says so.
"""
