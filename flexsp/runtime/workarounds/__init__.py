"""Workarounds for faults of other programs, one file a fault.

| file | fault of | can go when, by tests of `tests/runtime/` or as said |
|---|---|---|
| `vector_flags` | the code generator of Triton 3.6 | `test_llvm_workaround.py` finds no wrong carry without it |
| `unwritten_registers` | ptxas 12.8 to 13.4 | `test_machine_code.py` finds no bad listing of a fixed release |
| `python_parser` | Python 3.11.0 to 3.11.7 | flexsp supports no Python 3.11 before 3.11.8 |
| `moved_cache` | the cache of Triton 3.6 to 3.9 | `tests/ahead/` finds kernels in a moved folder without it |
| `device_guard` | torch 2.11 for CUDA, on hosts without a GPU | flexsp supports no torch before 2.12 |

What a release of Triton lacks in its own interface stands in `flexsp.runtime.triton_private`.
"""
