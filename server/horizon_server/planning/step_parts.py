"""What a step consists of: records of the work that `step_work` counts and `step_time` turns into seconds. Torch-free.

Units: floating-point operations, bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from horizon_server.records.execution import RING_SLOTS


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """How the engine carries out a step. The defaults are the plain schedule, each field is one change to it, and
    `TODAY` has those that are made.

    `fused` layers and `fused_head`
    read and write each tensor once instead of once per operation. `accumulates_in_gemm`: products add to the fp32
    gradient themselves. `sends_rows`: the optimizer updates the embedding rows in use first, and their gradients travel
    as rows. `two_pass_head`: the head runs forward for the log-probabilities before it runs for the gradients, as
    objectives need. `keeps_embedding`: table, moments and gradient of the embedding are on the device.
    `skips_projection`: the recompute leaves out the layer's last product, whose result no gradient needs.
    `fewer_copies`: `fused` layers on a GPU sum the gradients of what several maps read inside the products, and take
    attention's results where its kernel wrote them.
    """

    fused: bool = False
    fused_head: bool = False
    accumulates_in_gemm: bool = False
    sends_rows: bool = False
    keeps_embedding: bool = False
    skips_projection: bool = True
    two_pass_head: bool = False
    fewer_copies: bool = False


TODAY = EngineFacts(sends_rows=True, fused_head=True, accumulates_in_gemm=True, fewer_copies=True)


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """One layer over all tokens of a step. `attention_flops` are those of one forward; `accumulate_bytes` are of all
    micro-batches. `attention_backward_times` is what its backward takes in units of the fastest kernel's."""

    forward_flops: float
    recompute_flops: float
    backward_flops: float
    attention_flops: float
    forward_bytes: float
    recompute_bytes: float
    backward_bytes: float
    accumulate_bytes: float
    attention_backward_times: float = 1.0
    attention_times: float = 1.0
    """How often attention is computed in forward, and as often in the recompute: more than once where experts come in
    pages."""


@dataclass(frozen=True, kw_only=True)
class HeadWork:
    """The output projection and the loss over all tokens of a step, forward and backward. `forward_*` are one forward
    by itself, for the log-probabilities."""

    flops: float
    elementwise_bytes: float
    accumulate_bytes: float
    forward_flops: float
    forward_bytes: float


@dataclass(frozen=True, kw_only=True)
class UnitTraffic:
    """What one unit moves. `offload_bytes` are layer inputs, or keys, values and attention's outputs of rows in chunks,
    that wait on the host, once down and once up; `clear_bytes` is the device memory of its gradient that is cleared,
    normed and rounded; `update_bytes` what the optimizer moves through host memory. What is trained of a `resident`
    unit goes up once a step. `unpack_bytes` is the device memory that is read and written while its packed weights
    become those that are computed with, whenever it goes up. A unit whose optimizer states are on the device neither
    moves nor takes an update of the host's: its `clear_bytes` have what the device's own update reads and writes."""

    upload_bytes: float
    download_bytes: float
    clear_bytes: float
    update_bytes: float = 0.0
    offload_bytes: float = 0.0
    unpack_bytes: float = 0.0
    resident: bool = False
    compressed_parameters: int = 0
    """Whose states are compressed."""
    compressed_bytes: float = 0.0
    """Of `update_bytes`, theirs."""
    page_bytes: float = 0.0
    """Of what goes up, pages of experts, which backward never finds in a slot of forward."""
    page_unpack_bytes: float = 0.0
    """Their part of `unpack_bytes`."""
    peer_up_bytes: float = 0.0
    """What a rank gets of the weights from the others."""
    peer_down_bytes: float = 0.0
    """What it gets of the others' sums of gradients, in fp32."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingTraffic:
    """The rows in use on their way up for forward (`rows_up_bytes`) and again for backward, and down, a tied table's
    whole gradient, the part of the host's gradient that is
    cleared for the rows, and the device memory traffic of the rows' gradient.
    `first_update_bytes` is what must be updated before the rows may go up, `last_update_bytes` the rest of the
    table."""

    rows_up_bytes: float
    rows_up_again_bytes: float
    rows_down_bytes: float
    table_down_bytes: float
    clear_host_bytes: float
    gradient_bytes: float
    first_update_bytes: float
    last_update_bytes: float
    peer_rows_bytes: float = 0.0
    """What a rank that embeds all tokens gets of the rows from the others, in forward."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """One optimizer step as the schedule carries it out. `layers` and `head` are the units' traffic; `layer` is an
    average layer. The last `product_layers` recompute no products. Backward ends at the `first_trained` unit.

    Of several ranks with a device each, what one of them does; where they compute on the same processors, what all of
    them do together. `num_tokens` and `model_flops` are the whole step's in any case, and where the ranks divide
    the layers, all of `layer`, `layers` and `num_micro_batches`."""

    num_tokens: int
    hidden_size: int
    micro_batch_tokens: int
    num_micro_batches: int
    document_tokens: int
    model_flops: float
    updates_in_backward: bool
    layer: LayerWork
    layers: tuple[UnitTraffic, ...]
    head: HeadWork
    head_traffic: UnitTraffic
    embedding: EmbeddingTraffic
    product_layers: int = 0
    attention_layers: int = 0
    """The last ones, whose recompute attends to nothing: the outputs come back from the host."""
    first_trained: int = 0
    peers_are_processes: bool = False
    """Whether what ranks send to each other stays in this machine's memory."""
    num_links: int = 1
    """Links that the host's memory feeds at the same time."""
    layer_ranks: tuple[int, ...] = ()
    """Where ranks divide the layers, the rank of each; empty where each computes its part of every layer."""
    lanes: int = 1
    """That the ranks divide where each computes its part of every layer."""
    hop_bytes: float = 0.0
    """Of a hidden state of all tokens, which such ranks hand on through the host's memory, or which waits there where
    rows are computed in chunks."""
    head_hop_bytes: float = 0.0
    """Of it, what a rank's head reads."""
    drive_bytes: tuple[tuple[int, int], ...] = ()
    """Unit and bytes of the states that are read from drives and written to them."""
    drive_spans: tuple[tuple[int, int], ...] = ()
    """Unit and number of the spans that these are cut into."""
    ring_slots: int = RING_SLOTS
    """Spans whose states are in memory on their way."""
    longest_share: float = 1.0
    """Tokens of the rank that has the most documents, in units of an equal part: the others wait for it."""

    @property
    def kept_layers(self) -> int:
        """The last ones, of which backward does not compute all of forward again."""
        return self.product_layers or self.attention_layers
