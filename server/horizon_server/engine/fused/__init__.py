"""Fused layer arithmetic for GPUs: RMSNorm, rotary positions and SwiGLU as operators of their own, with Triton kernels.

`substitution` finds by trial where a layer computes them. The compiler (`compiled`) takes the operators as they are,
and a trial decides whether they are faster than the code it would write itself.
"""
