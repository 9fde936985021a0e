"""Compiles Triton kernels for a GPU that need not be there; prints the size of each one's machine code.

Run as a process of its own, because an interpreter of kernels may be chosen when they are imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from horizon_server.engine import square_sums_triton
from horizon_server.engine.fused import rms_norm_triton, rotary_triton, swiglu_triton
from horizon_server.store import adamw_triton, packing_triton

H100 = GPUTarget("cuda", 90, 32)
KERNELS: list[tuple[Any, Mapping[str, Any], int]] = [
    (rms_norm_triton._rms_norm_forward, {"ADDS": True, "ROUNDS": True, "ROWS": 1, "BLOCK": 4096}, 8),
    (rms_norm_triton._rms_norm_forward, {"ADDS": False, "ROUNDS": False, "ROWS": 32, "BLOCK": 128}, 8),
    (rms_norm_triton._rms_norm_backward, {"ADDS": True, "ROUNDS": True, "ROWS": 1, "BLOCK": 16384}, 16),
    (rms_norm_triton._rms_norm_backward, {"ADDS": False, "ROUNDS": False, "ROWS": 32, "BLOCK": 128}, 8),
    (rotary_triton._rotary_turn, {"IS_BACKWARD": False, "ROUNDS": True, "HEADS": 32, "HALF": 64, "KEPT": 0}, 4),
    (rotary_triton._rotary_turn, {"IS_BACKWARD": True, "ROUNDS": False, "HEADS": 1, "HALF": 1, "KEPT": 16}, 4),
    (swiglu_triton._swiglu_forward, {"BLOCK": 4096}, 8),
    (swiglu_triton._swiglu_backward, {"BLOCK": 4096}, 8),
    (square_sums_triton._block_kernel, {"TILE": 1024}, 4),
    (packing_triton._unpack_nf4, {"BLOCK": 64, "GROUP": 256, "TILE": 2048}, 4),
    (packing_triton._unpack_int8, {"TILE": 2048}, 4),
    (adamw_triton._adamw, {"GRADS_ARE_BF16": True, "TILE": 1024}, 4),
    (adamw_triton._adamw, {"GRADS_ARE_BF16": False, "TILE": 1024}, 4),
]
POINTERS = {
    "partial_sums": "*fp32",
    "codes": "*u8",
    "scales": "*u8",
    "group_scales": "*fp32",
    "levels": "*fp32",
    "hi": "*i16",
    "lo": "*i16",
    "exp_avg": "*fp32",
    "exp_avg_sq": "*fp32",
    "grads": "*fp32",
} | dict.fromkeys(
    ("values", "added", "total", "weight", "out", "gradient", "gate", "up", "for_gate", "for_up", "cos", "sin"), "*bf16"
)
NUMBERS = {"eps": "fp32", "offset": "fp32"} | dict.fromkeys(
    ("grad_scale", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "scaled_eps", "step_size", "decay_factor"),
    "fp32",
)


def machine_code(kernel: Any, constants: Mapping[str, Any], num_warps: int) -> Any:
    """A kernel compiled for an H100, of bf16 tensors and 32-bit sizes."""
    names = kernel.arg_names
    kinds = {name: (POINTERS | NUMBERS).get(name, "i32") for name in names} | dict.fromkeys(constants, "constexpr")
    if constants.get("GRADS_ARE_BF16"):
        kinds["grads"] = "*i16"
    by_place = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=by_place)
    return triton.compile(source, target=H100, options={"num_warps": num_warps})


if __name__ == "__main__":
    codes = [(kernel.__name__, machine_code(kernel, constants, warps)) for kernel, constants, warps in KERNELS]
    print(json.dumps([(name, len(code.asm["cubin"])) for name, code in codes]))
