"""The arithmetic of a step: a torch reference that is the truth, native kernels for CPUs and Triton's for GPUs.

`ops.backend(device)` chooses. All offer the functions of `ops.Kernels`, and all give the same bits.
"""
