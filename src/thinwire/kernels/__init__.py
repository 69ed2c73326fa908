"""The arithmetic of a step: a torch reference that defines it, native kernels for CPUs and Triton kernels for GPUs.

`ops.backend(device)` chooses. All offer the functions of `ops.Kernels`, and all give the same bits.
"""
