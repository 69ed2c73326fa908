"""The arithmetic of a step: a torch reference that is the truth, and native kernels that run at the rate of memory.

`ops.backend(device)` chooses. Both offer the functions of `ops.Kernels`, and both give the same bits.
"""
