"""Memory traffic of everything in a layer that is not a product, for one token. Torch-free."""

from __future__ import annotations

from horizon_server.planning.model_folder import ModelShape


def elementwise_bytes(model: ModelShape, element: int, *, fused: bool) -> tuple[float, float, float]:
    """Memory traffic of everything in a layer that is not a product, for one token: forward, recompute, backward.

    Counted kernel by kernel on a layer with RMSNorm, rotary positions and SwiGLU in bf16, by hidden elements, elements
    of query and key, and inner elements of the feed-forward part (of all experts that a token visits).
    """
    hidden, experts, inner = model.hidden_size, model.experts, model.intermediate_size
    rotated = (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    if experts is not None:
        inner = experts.num_computed_per_token * experts.intermediate_size + experts.shared_intermediate_size
    if fused:
        # Each input is read once and each output written once: two norms with residuals 16, and the copy of the output.
        forward = 24 * hidden + 4 * rotated + 6 * inner
        backward = 58 * hidden + 4 * rotated + 10 * inner
    else:
        # Two norms of 8 kernels each 72, two residuals 12, the copy of the output 4; backward: norms 184, sums of
        # gradients 37.
        forward = 88 * hidden + 20 * rotated + 10 * inner
        backward = 221 * hidden + 34 * rotated + 18 * inner
    scale = element / 2
    # The recompute's output is copied nowhere.
    return scale * forward, scale * (forward - 4 * hidden), scale * backward


def copied_bytes(model: ModelShape, element: int) -> tuple[float, float, float]:
    """What of `elementwise_bytes` fused layers do without where there are `fewer_copies`: forward, recompute, backward.

    A copy reads and writes: attention's output, and its gradients of queries, keys and values. Sums in passes of their
    own read each product and write one: of gate and up, and of queries, keys and values.
    """
    queries, keys = (heads * model.head_dim for heads in (model.num_attention_heads, model.num_key_value_heads))
    output, gradients = 2 * queries, 2 * (queries + 2 * keys)
    sums = (2 + 1) * model.hidden_size + (3 + 1) * model.hidden_size
    return element * output, element * output, element * (gradients + sums)
