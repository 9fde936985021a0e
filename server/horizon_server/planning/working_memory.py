"""What computing takes beside what is stored: what autograd keeps of a layer, a logits chunk, an allocator's peak, a
heap.

The formulas were counted on real layers, and what frameworks allocate by themselves is calibrated, and says so.
Torch-free.

Units: bytes, unless a name says elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from horizon_server.planning.model_folder import ModelShape
from horizon_server.records.execution import DeviceKind
from horizon_server.store.layout import PACKED_PIECE_ELEMENTS, StoreLayout
from horizon_server.store.pages import EXPERT_NAME

CUBLAS_BYTES = 2 * (32 << 20)
"""cuBLAS's workspace, 32 MiB on Hopper for each handle: compute's thread and autograd's have one each. It is in torch's
allocator."""

EMBEDDING_GRADIENT_TOKENS = 1 << 14
"""Tokens whose gradients are added up into rows of the embedding at once: each time touches all rows in use."""

_FP32 = 4
_BF16 = 2
# Calibrated on packed rows of 32,768 tokens of a small qwen3: what the heap keeps for each byte of a layer's backward,
# because freed blocks do not fit later ones. Blocks above the second figure go back to the system.
_RETAINED_SHARE: Mapping[int, float] = {_FP32: 0.38, _BF16: 0.78}
_KEPT_BLOCK_BYTES = 64 << 20

# For each element of a hidden state: seven planes in fp32 and what the norm was given, less what goes before the last
# comes.
_NORM_BACKWARD_BYTES = 27
TOKEN_BYTES = 5 * 8
"""Of a step's token on the device: its id, row, position, place and target."""
_CHUNK_ELEMENTS: Mapping[DeviceKind, int] = {"host": 16 << 20, "cuda": 1 << 30}
# Below this, reading and writing the projection's whole gradient once per chunk would cost more than the chunk.
_MIN_CHUNK_TOKENS = 512
_MAX_CHUNK_TOKENS = 8192
# Rows of logits that are computed in fp32 at once on the host, where that is more than one row.
_BLOCK_ELEMENTS = 1 << 19
_GATHERED_ROWS = 4096
# As in engine.attention.blocks (a test compares).
BLOCK_SCORES = 1 << 22
BLOCK_QUERIES = 32
_ROUTING_ELEMENTS = 10
"""Per visited expert: its weight, and where the token was sorted to and from, in 64-bit numbers."""


class CountedScores(Protocol):
    """What was counted on a model's layers whose attention keeps its scores."""

    @property
    def peak_per_pair(self) -> float:
        """Bytes for each pair of a row's tokens, at the widest moment of forward and backward."""

    @property
    def small_per_token(self) -> float:
        """Bytes for each token at the widest moment beside scores."""

    def call_at(self, row_tokens: int) -> int:
        """Bytes of what the layers of a row are called with."""


def logits_chunk_tokens(vocab_size: int, device_kind: DeviceKind = "host") -> int:
    """Tokens of one logits chunk: the rule the engine follows, which keeps a chunk's logits near a size that suits the
    device."""
    return max(_MIN_CHUNK_TOKENS, min(_MAX_CHUNK_TOKENS, _CHUNK_ELEMENTS[device_kind] // vocab_size))


def unpacking_bytes(layout: StoreLayout) -> int:
    """What turning a piece of a packed tensor into numbers takes: its codes as indices, their levels, their scales, the
    products."""
    packed = [tensor for _, tensor in layout.tensors() if tensor.packing != "none"]
    per_element = {"int8": _FP32, "nf4": 2 + 3 * _FP32}
    return max((min(t.num_elements, PACKED_PIECE_ELEMENTS) * per_element[t.packing] for t in packed), default=0)


def chunk_bytes(model: ModelShape, edge_tokens: int, element_bytes: int) -> int:
    """A logits chunk on the host: the logits, which become their own gradient, and three hidden states that autograd
    keeps."""
    chunk_tokens = min(edge_tokens, logits_chunk_tokens(model.vocab_size))
    return chunk_tokens * (model.vocab_size + 3 * model.hidden_size) * element_bytes


def call_bytes(model: ModelShape, row_tokens: int, tokens_per_step: int, element_bytes: int) -> int:
    """What the model's own forward calls its layers with: rotary tables, positions, and a mask per packed row where it
    needs one."""
    mask_bytes = (2 * element_bytes if model.softcaps_attention else 1) if model.needs_masks else 0
    per_token = 2 * model.head_dim * element_bytes + 8 + row_tokens * mask_bytes
    return tokens_per_step * per_token


def layer_saved_elements(model: ModelShape, row_tokens: int) -> int:
    """What autograd keeps of one layer for one row, counted on Qwen3 (the normed q and k make it the largest of its
    kind).

    Attention without masks keeps queries, keys, values, its output and a number per head. With a mask it sees T bytes
    more per token, and repeats the keys for every head; a soft cap then makes it keep its scores, twice.
    """
    query = model.num_attention_heads * model.head_dim
    key = model.num_key_value_heads * model.head_dim
    per_token = 5 * model.hidden_size + _inner_saved_elements(model)
    # By itself, of an expert that every token of the row visits.
    expert = _visit_elements(model) * row_tokens if model.experts and model.experts.one_by_one else 0
    if not model.needs_masks:
        # A norm of queries and keys keeps both once more before it and after it, and a number per head.
        times, num_norms = (4, model.num_attention_heads + model.num_key_value_heads) if model.norms_queries else (2, 0)
        attention = times * (query + key) + num_norms + model.num_attention_heads + 3 * model.latent_size
        return max(expert, (per_token + attention) * row_tokens)
    per_token += 6 * query + 2 * key + row_tokens
    if model.softcaps_attention:
        per_token += 2 * model.num_attention_heads * row_tokens
    return max(expert, per_token * row_tokens)


def norm_input_elements(model: ModelShape, row_tokens: int) -> int:
    """What a layer that computes in bf16 keeps besides, counted on Qwen3: its norms compute in fp32 and keep their
    inputs in it."""
    query = model.num_attention_heads * model.head_dim
    key = model.num_key_value_heads * model.head_dim
    return (3 * model.hidden_size + query + key) * row_tokens


def _inner_saved_elements(model: ModelShape) -> int:
    """What autograd keeps of a layer's feed-forward part for one token, counted on Qwen3, Mixtral and Qwen3-MoE.

    Every expert that a token visits keeps what a feed-forward part of its size would, its input and output, and where
    it went. A model that has experts in some layers only is as large as its largest layer.
    """
    dense = 4 * model.intermediate_size
    experts = model.experts
    if experts is None:
        return dense
    shared = 4 * experts.shared_intermediate_size
    visits = 0 if experts.one_by_one else experts.num_computed_per_token * _visit_elements(model)
    return max(dense, visits + shared + experts.num_experts)


def _visit_elements(model: ModelShape) -> int:
    """What autograd keeps of an expert that a token visits."""
    assert model.experts is not None
    return 4 * model.experts.intermediate_size + 2 * model.hidden_size + _ROUTING_ELEMENTS


def _inner_backward_elements(model: ModelShape) -> int:
    """Gradients on their way through the widest part of a layer, for one token."""
    dense = 3 * model.intermediate_size
    experts = model.experts
    if experts is None:
        return dense
    per_visit = 3 * experts.intermediate_size + 2 * model.hidden_size
    visits = 1 if experts.one_by_one else experts.num_computed_per_token
    return max(dense, visits * per_visit + 3 * experts.shared_intermediate_size)


def largest_weight_elements(layout: StoreLayout, model: ModelShape) -> int:
    """The largest parameter of a layer as the model sees it: the first projections of all experts are one, or those of
    each where one is computed after the other."""
    experts = model.experts
    one_by_one = experts is not None and experts.one_by_one
    tensors = [tensor for unit in layout.units if unit.kind == "layer" for tensor in unit.tensors]
    largest = max(t.num_elements for t in tensors if not one_by_one or not EXPERT_NAME.search(t.name))
    if experts is None:
        return largest
    together = 1 if one_by_one else experts.num_experts
    return max(largest, 2 * together * experts.intermediate_size * model.hidden_size)


def routing_bytes(model: ModelShape, tokens_per_step: int) -> int:
    """Which tokens go to each expert, in 64-bit numbers, their weights, and the gradients of these, while a layer whose
    experts come in pages is visited."""
    if model.experts is None or not model.experts.one_by_one:
        return 0
    return tokens_per_step * model.experts.num_experts_per_token * (2 * 8 + 2 * _FP32)


def cuda_working_bytes(
    layout: StoreLayout, model: ModelShape, row_tokens: int, tokens_per_step: int, *, edge_tokens: int
) -> int:
    """What the allocator holds at the peak of a phase on cuda, beyond what is allocated by name: a layer's backward, a
    logits chunk, or the rows of the embedding; head and embedding see `edge_tokens` at once. A test tracks the
    allocations of the real code in bf16 and compares; no GPU has confirmed it yet.
    """
    vocabulary, hidden = model.vocab_size, model.hidden_size
    # Scores in fp32 and in bf16, and the gradients of both.
    scores_bytes = model.num_score_planes_on_gpu * row_tokens * row_tokens * 2 * (_FP32 + _BF16)
    layer_bytes = _cuda_layer_bytes(layout, model, row_tokens) + scores_bytes
    # The logits, which become their own gradient, until the backward of the norm before them is over. The projection's
    # goes to its slot.
    chunk_tokens = min(edge_tokens, logits_chunk_tokens(vocabulary, "cuda"))
    head_bytes = chunk_tokens * (vocabulary * _BF16 + hidden * _NORM_BACKWARD_BYTES)
    # Some tokens' gradients and those of all rows in use.
    added_tokens = min(edge_tokens, EMBEDDING_GRADIENT_TOKENS)
    row_bytes = (min(tokens_per_step, vocabulary) + added_tokens) * hidden * _FP32
    return max(layer_bytes, head_bytes, row_bytes) + tokens_per_step * TOKEN_BYTES + CUBLAS_BYTES


def _cuda_layer_bytes(layout: StoreLayout, model: ModelShape, row_tokens: int) -> int:
    """What one layer's backward holds at its widest moment, by when attention and norms have saved all they save."""
    heads, hidden, inner = model.num_attention_heads, model.hidden_size, model.intermediate_size
    query, key = heads * model.head_dim, model.num_key_value_heads * model.head_dim
    names = " ".join(tensor.name for unit in layout.units if unit.kind == "layer" for tensor in unit.tensors)
    # Queries, keys, values and the output, and its logarithm of sums in fp32.
    attention = 2 * _BF16 * (query + key) + _FP32 * heads
    if "q_norm" in names:
        attention += (_FP32 + _BF16) * (query + key)
    if "qkv" in names:
        # Queries and keys are copies of their parts of one product, which stays.
        attention += _BF16 * (2 * query + key)
    # Two norms, each with a copy of its input in fp32, its result in bf16 twice, the sum that it reads, and one
    # gradient. One with a bias is a single operation of torch's, which makes no copies.
    norms = (9 if "norm.bias" in names or "ln_1.bias" in names else 18) * hidden
    scores = 8 * heads * row_tokens if model.softcaps_attention else 0
    planes = 6 if "gate" in names else 7
    moments = [norms + scores + _BF16 * planes * inner]
    if "post_feedforward" in names or "post_mlp" in names:
        # The backward of a norm after the feed-forward part, in fp32, while that part has still to come; some have
        # norms before it too.
        moments.append((50 if "input_layernorm" in names else 40) * hidden + scores + _BF16 * 4 * inner)
    if model.softcaps_attention:
        # Probabilities, two gradients in fp32 and the cap's own result.
        moments.append(norms + 14 * heads * row_tokens)
    one_by_one_bytes = 0
    if model.experts is not None:
        visits, expert = model.experts.num_computed_per_token, model.experts.intermediate_size
        shared = _BF16 * 6 * model.experts.shared_intermediate_size
        visit_bytes = max(8 * expert + 18 * hidden, 12 * expert + 6 * hidden)
        if model.experts.one_by_one:
            # The backward of the norm before them is the widest moment of the rest; or an expert that all tokens visit.
            visits, one_by_one_bytes = 0, row_tokens * visit_bytes
            moments.append(34 * hidden)
        moments.append(norms + shared + visits * visit_bytes)
    # Gradients of projections go to their slot; those of experts, which are one parameter, are made whole first.
    widest_weight = largest_weight_elements(layout, model) * _BF16 if model.experts is not None else 0
    weight_bytes = max(0, widest_weight - row_tokens * inner * _BF16)
    layer_bytes = row_tokens * (attention + max(moments)) + _cuda_mask_bytes(model, row_tokens)
    if one_by_one_bytes:
        return max(layer_bytes, one_by_one_bytes + weight_bytes)
    return layer_bytes + weight_bytes


def _cuda_mask_bytes(model: ModelShape, row_tokens: int) -> int:
    """The bias that attention makes of a packed row's mask."""
    return row_tokens * row_tokens * _BF16 if model.needs_masks else 0


def heap_bytes(
    layout: StoreLayout,
    model: ModelShape,
    row_tokens: int,
    tokens_per_step: int,
    element_bytes: int,
    *,
    counted: CountedScores | None = None,
    called_tokens: int,
    edge_tokens: int,
) -> int:
    """The heap of a worker that computes on the host, calibrated against peak RSS. `counted` replaces the planes of
    scores; `called_tokens` of a step are those whose tables are there at once, and `edge_tokens` those
    that head and embedding see at once.

    The C library keeps most of what is freed (blocks up to 32 MiB), and each thread its own, so the phases of a step
    add up instead of sharing their room: one layer's backward, one logits chunk, the embedding rows in both directions.
    """
    scores = 2 * model.num_attention_heads * row_tokens if model.softcaps_attention else 0
    backward_elements = (_inner_backward_elements(model) + 2 * model.hidden_size + scores) * row_tokens
    largest_weight = largest_weight_elements(layout, model)
    # Scores that are kept have a gradient, and so has the softmax's input; where attention is written out in the
    # model's class (no kernel fuses it on cuda either), the mask makes a copy as well.
    gradient_planes = 2 * model.num_score_planes + model.num_score_planes_on_gpu
    unfused_elements = (model.num_score_planes + gradient_planes) * row_tokens**2
    small_elements = layer_saved_elements(model, row_tokens) + backward_elements
    if counted is not None:
        # Scores go back to the system. What the rest takes at its own widest moment stays.
        unfused_bytes = row_tokens * (counted.peak_per_pair * row_tokens + counted.small_per_token)
        unfused_elements = int(unfused_bytes) // _FP32
    layer_elements = small_elements + unfused_elements + largest_weight
    # Logits, the gradient of their hidden states, and a block of rows in fp32; where weights are in bf16, the
    # projection's gradient too.
    chunk_tokens = min(edge_tokens, logits_chunk_tokens(model.vocab_size))
    head_bytes = chunk_tokens * (model.vocab_size + model.hidden_size) * element_bytes
    head_bytes += 3 * max(_BLOCK_ELEMENTS, model.vocab_size) * _FP32
    if element_bytes == _BF16:
        head_bytes += model.hidden_size * model.vocab_size * _BF16
    num_rows = min(tokens_per_step, model.vocab_size)
    row_bytes = (20 * min(num_rows, _GATHERED_ROWS) + 12 * num_rows) * model.hidden_size
    calls = call_bytes(model, row_tokens, called_tokens, element_bytes)
    if counted is not None:
        # A mask is made of another one.
        calls = (-(-tokens_per_step // row_tokens) + 1) * counted.call_at(row_tokens)
    if element_bytes == _BF16:
        layer_elements += norm_input_elements(model, row_tokens)
    blocks_bytes = _block_elements(model, row_tokens) * _FP32
    if not model.needs_masks and row_tokens * model.hidden_size * element_bytes <= _KEPT_BLOCK_BYTES:
        retained = (layer_elements - unfused_elements - largest_weight) * element_bytes * _RETAINED_SHARE[element_bytes]
        # Attention in blocks takes less than its own figure, which is for the longest documents.
        blocks_bytes = max(blocks_bytes, int(retained))
    return layer_elements * element_bytes + head_bytes + row_bytes + calls + blocks_bytes


def _block_elements(model: ModelShape, row_tokens: int) -> int:
    """Scores of a block of queries in attention without masks that no kernel fuses, and what is computed of them in a
    backward."""
    if not model.attends_in_blocks:
        return 0
    return 5 * max(BLOCK_SCORES, BLOCK_QUERIES * model.num_attention_heads * row_tokens)
