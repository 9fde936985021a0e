"""A Hugging Face model folder as the daemon sees it: config.json, tensor headers, the layout they imply.

Reads no weights, runs no code from the folder, and loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_server.errors import InvalidModel
from horizon_server.store.layout import (
    OUTPUT_PROJECTIONS,
    StoreLayout,
    build_layout,
    is_input_table,
    is_output_projection,
    parameter_shapes,
)
from horizon_server.store.model_files import (
    config_count,
    config_size,
    is_prediction_head,
    num_decoder_layers,
    read_config,
    text_config,
)
from horizon_server.store.safetensors_files import TensorHeader, read_safetensors_headers

_HEAD_COUNTS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_HIDDEN_SIZES = ("hidden_size", "n_embd", "d_model", "emb_dim")
_SPECIAL_WIDTHS = ("word_embed_proj_dim", "embedding_size", "input_embedding_size")
_TABLE_WIDTHS = (*_SPECIAL_WIDTHS, *_HIDDEN_SIZES)
"""What configs call the columns of the embedding, the special names first."""

WITHOUT_ATTENTION = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"})
"""Model types of recurrent layers only. What some of them call heads are not those of attention."""

UNFUSED_ATTENTION = frozenset(
    {
        "bloom",
        "codegen",
        "deepseek_v4",
        "flint",
        "gpt_neo",
        "gpt_neox_japanese",
        "gpt_oss",
        "gptj",
        "granite_swa",
        "granitemoe_swa",
        "hy_v4",
        "inkling2_text",
        "mimo_v2_flash",
        "mpt",
        "openai-gpt",
        "xglm",
        # These ask for fused attention, with arguments for which a CPU has no fused kernel.
        "doge",
        "falcon",
    }
)
"""Model types whose attention keeps its scores: their classes in transformers have no fused one (a test compares), but
for the last."""

MASKED_ATTENTION = frozenset(
    {
        "axk2",
        "bloom",
        "codegen",
        "deepseek_v32",
        "deepseek_v4",
        "doge",
        "dots3_note",
        "falcon",
        "gemma4_text",
        "gemma4_unified_text",
        "glm_moe_dsa",
        "gpt_neo",
        "gpt_neox_japanese",
        "gptj",
        "jetmoe",
        "llama4_text",
        "longcat_flash",
        "mpt",
        "openai-gpt",
        "xglm",
    }
)
"""Model types whose attention takes a mask, because the engine's own is not what the model means (a test compares with
its trial)."""

TIED_BY_DEFAULT = frozenset(
    {
        "biogpt",
        "bloom",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cohere_compass_text",
        "ctrl",
        "ernie4_5",
        "ernie4_5_moe",
        "falcon",
        "falcon_mamba",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gemma3n",
        "gemma3n_text",
        "gemma4",
        "gemma4_text",
        "gemma4_unified",
        "gemma4_unified_text",
        "gpt-sw3",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox_japanese",
        "granite_swa",
        "jetmoe",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "mamba",
        "minicpm3",
        "modernbert-decoder",
        "mpt",
        "openai-gpt",
        "opt",
        "recurrent_gemma",
        "smollm3",
        "starcoder2",
        "vaultgemma",
        "xglm",
        "youtu",
        "zamba",
        "zamba2",
        "zaya",
    }
)
"""Model types whose class in transformers ties the embedding where config.json does not say (a test compares)."""

NEVER_TIED = frozenset(
    {"bailing_hybrid", "inkling2_text", "inkling_text", "kimi_linear", "moshi", "nemotron_h", "xlstm"}
)
"""Model types whose class in transformers has no way to tie the embedding, whatever config.json says (a test
compares)."""

# Where it is not one: a layer with two attentions; a mask that is multiplied.
_PLANES_PER_HEAD = {"longcat_flash": 2, "openai-gpt": 2}

POSITION_MASKS = {"gpt_neo": 1, "openai-gpt": 4}
"""Model types whose attention holds a mask over all pairs of positions and saves it for its backward: bytes per pair (a
test compares)."""

_BIAS = ("e_score_correction_bias",)
KEPT_IN_FP32: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "deepseek_v3",
            "deepseek_v32",
            "dots1",
            "dots3_note",
            "dots3_note_text",
            "exaone_moe",
            "glm4_moe",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "hy_v3",
            "kolibri1",
            "mimo_v2_flash",
            "nemotron_h",
            "solar_open",
        ),
        _BIAS,
    ),
    "bailing_hybrid": (*_BIAS, "A_log", "conv1d", "dt_bias"),
    "beam": (*_BIAS, "mlp.gate.weight"),
    "deepseek_v4": (
        *_BIAS,
        "attn_hc",
        "ffn_hc",
        "hc_head",
        "input_layernorm",
        "kv_norm",
        "norm",
        "position_bias",
        "post_attention_layernorm",
        "q_a_norm",
        "sinks",
    ),
    "ernie4_5_moe": ("gate.weight", "moe_statics"),
    "flint": ("gate.weight", "sinks"),
    "hy_v4": (
        *_BIAS,
        "base",
        "fn",
        "hc_base",
        "hc_fn",
        "hc_scale",
        "k_norm",
        "lm_head",
        "scale",
        "sinks",
        "weights_proj",
    ),
    "inkling2_text": (
        *_BIAS,
        "attention_input",
        "final_input",
        "k_sconv.conv1d",
        "mlp.gate.weight",
        "mlp_input",
        "post_attention_convolution",
        "post_mlp_convolution",
        "v_sconv.conv1d",
    ),
    "inkling_text": (*_BIAS, "attn_sconv", "gate.global_scale", "k_sconv", "mlp_sconv", "v_sconv"),
}
"""Parts of names of parameters that the class of a model type keeps in fp32 where everything else is in bf16 (a test
compares)."""

_EXPERT_SIZES = (
    "moe_intermediate_size",
    "expert_ffn_hidden_size",
    "intermediate_size",
    "ffn_dim",
    "ffn_hidden_size",
)
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
_COMPUTES_ALL_EXPERTS = frozenset({"llama4_text"})
"""Model types that repeat every token for every expert, and have one shared expert of the same size."""

UNBOUNDED_POSITIONS = 1 << 40
"""The limit on the sequence length of a config that has none."""


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Feed-forward layers of many experts, of which each token visits a few, and shared ones that every token
    visits."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    computes_all: bool = False
    """Whether the model's class runs every token through every expert, with zeros for those that it does not visit."""
    one_by_one: bool = False
    """Whether the engine computes one expert after the other, and what one keeps is gone before the next."""

    @property
    def num_computed_per_token(self) -> int:
        """Experts that keep something of a token for their backward."""
        return self.num_experts if self.computes_all else self.num_experts_per_token


def require_decoder_only(config: Mapping[str, Any]) -> None:
    """Let the config of a model without an encoder pass. Raises InvalidModel."""
    if config.get("is_encoder_decoder"):
        raise InvalidModel("config.json says is_encoder_decoder; only decoder-only language models can be trained here")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder that memory depends on, under one name each whatever its config calls them."""

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    """0 in a model without attention."""
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    softcaps_attention: bool
    tied: bool
    needs_masks: bool = False
    """Whether attention takes a mask over all pairs of a packed row's tokens, because the engine's own is not what the
    model means."""
    norms_queries: bool = True
    """Whether layers normalise queries and keys; what they keep for that is planned where it is not known."""
    latent_size: int = 0
    """Elements of what queries and keys are expanded from, where they are compressed; each is normalised or rotated."""
    attends_in_blocks: bool = False
    """Whether the engine's own attention computes scores of a block of queries in memory: for windows, soft caps and
    sinks."""
    experts: ExpertShape | None = None
    num_score_planes: int = 0
    """Planes of T x T attention scores that a layer keeps for its backward on the host; 0 where attention is fused, or
    is capped."""
    num_score_planes_on_gpu: int = 0
    """The same on cuda, which has fused kernels for more forms of attention."""
    position_mask_bytes: int = 0
    """A mask over all pairs of positions that the attention of each layer holds, whatever the length of a row."""
    kept_in_fp32: tuple[str, ...] = ()
    """Parts of names of parameters that are computed with in fp32 on a device that computes in bf16."""

    @property
    def key_value_elements(self) -> int:
        """Of one token in one layer. Values count as large as keys."""
        return 2 * self.num_key_value_heads * self.head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, names: Iterable[str] | None = None) -> ModelShape:
        """Read the sizes from the object in config.json; a multimodal config's text part counts.

        `names` of the tensors decide whether the model is tied where its config does not say.

        Raises:
            InvalidModel: the model is an encoder-decoder, or a size is missing or not a positive integer; the message
                names it.
        """
        require_decoder_only(config)  # before the sizes, which encoder-decoders have twice and under other names
        text = text_config(config)
        hidden_size = config_size(text, *_HIDDEN_SIZES)
        has_attention = text.get("model_type") not in WITHOUT_ATTENTION
        longest = config_size(
            text, "max_position_embeddings", "n_positions", "max_seq_len", default=UNBOUNDED_POSITIONS
        )
        num_heads = config_size(text, *_HEAD_COUNTS) if has_attention else 0
        query_size = config_count(text, "qk_nope_head_dim") + config_count(text, "qk_rope_head_dim")
        needs_masks, is_capped = _needs_masks(text), text.get("attn_logit_softcapping") is not None
        inner_sizes = text.get("intermediate_size")
        if isinstance(inner_sizes, list) and inner_sizes:
            # One for each layer: the largest decides on memory.
            inner_size = max(config_size({"intermediate_size": size}, "intermediate_size") for size in inner_sizes)
        else:
            inner_size = config_size(text, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden_size)
        return cls(
            hidden_size=hidden_size,
            num_hidden_layers=num_decoder_layers(text),
            vocab_size=config_size(text, "vocab_size"),
            intermediate_size=inner_size,
            num_attention_heads=num_heads,
            num_key_value_heads=config_size(text, "num_key_value_heads", default=num_heads),
            head_dim=max(query_size, config_size(text, "head_dim", default=max(1, hidden_size // num_heads)))
            if has_attention
            else 0,
            max_position_embeddings=longest,
            # A soft cap on the scores rules out fused attention, so that the scores are kept where there are masks.
            softcaps_attention=needs_masks and is_capped,
            tied=_is_tied(config, names),
            needs_masks=needs_masks,
            norms_queries=(names is None or any("q_norm" in n for n in names)) and not query_size,
            latent_size=query_size
            and sum(config_count(text, n) for n in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")),
            attends_in_blocks=not needs_masks and (is_capped or bool(text.get("sliding_window"))),
            experts=_experts(text),
            num_score_planes=_score_planes(text, num_heads, on_gpu=False),
            num_score_planes_on_gpu=_score_planes(text, num_heads, on_gpu=True),
            # A config that leaves the positions out gets those of its class, which are not known here.
            position_mask_bytes=0
            if longest == UNBOUNDED_POSITIONS
            else POSITION_MASKS.get(str(text.get("model_type")), 0) * longest**2,
            kept_in_fp32=KEPT_IN_FP32.get(str(text.get("model_type")), ()),
        )


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """What a model folder announces, checked: its parsed config, its shape, its tensors and the place of each in the
    store."""

    path: Path
    config: Mapping[str, Any]
    shape: ModelShape
    headers: Mapping[str, TensorHeader]
    layout: StoreLayout

    def is_bfloat16(self, name: str) -> bool:
        """Whether a tensor is in bfloat16, so that the store's `hi` half holds it exactly."""
        return name in self.headers and self.headers[name].dtype == "BF16"


def open_model_folder(folder: Path) -> ModelFolder:
    """Read a folder's config and headers and lay its parameters out, without torch and without reading a weight.

    Raises:
        InvalidModel: the folder cannot be trained from; the message says which file and what to do.
    """
    config = read_config(folder)
    if "quantization_config" in config:
        raise InvalidModel(
            "holds quantised weights, which cannot be fine-tuned; give the bfloat16 original", file=folder
        )
    headers = read_safetensors_headers(folder)
    shape = ModelShape.from_config(config, names=headers)
    hidden_size = config_count(text_config(config), *_HIDDEN_SIZES)
    for name in _SPECIAL_WIDTHS:
        if (width := config_count(text_config(config), name)) not in (0, hidden_size):
            raise InvalidModel(
                f"config.json: {name} is {width} and the hidden size is {hidden_size}; a model whose embedding has "
                "another width than its "
                "hidden states is not supported"
            )
    if not shape.tied and not any(is_output_projection(name) for name in headers):
        raise InvalidModel(f": {_why_no_projection(headers, shape.vocab_size)}", file=folder)
    # Heads that predict further tokens are not trained, so they are not stored.
    shapes = {name: found for name, found in parameter_shapes(headers).items() if not is_prediction_head(config, name)}
    _check_edges(config, shapes, tied=shape.tied)
    layout = build_layout(shapes, num_layers=shape.num_hidden_layers, tied=shape.tied)
    return ModelFolder(path=folder, config=config, shape=shape, headers=headers, layout=layout)


def _why_no_projection(headers: Mapping[str, TensorHeader], vocab_size: int) -> str:
    """The reason why an untied folder has no output projection among its tensors."""
    alike = [n for n, h in headers.items() if len(h.shape) == 2 and h.shape[0] == vocab_size and not is_input_table(n)]
    if alike:
        return (
            f"its output projection seems to be {alike[0]}, and a projection of that name is not supported; supported "
            f"are {', '.join(OUTPUT_PROJECTIONS)}"
        )
    return (
        "it is not tied (tie_word_embeddings in config.json, or its architecture's default), but no tensor is the "
        "output projection (lm_head.weight); copy the folder again or correct the config"
    )


def _check_edges(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
    """Check the tables at both ends of the model against the sizes in its config, where it names them.

    The shapes in between depend on the architecture; they are checked against the model class when the weights are
    loaded.

    Raises:
        InvalidModel: a table has other rows than the vocabulary, or other columns than the hidden state; it is named.
    """
    text = text_config(config)
    sizes = config_count(text, "vocab_size"), config_count(text, *_TABLE_WIDTHS)
    inputs = [name for name in shapes if is_input_table(name)]
    outputs = [name for name in shapes if is_output_projection(name) and not tied]
    for names in (inputs, outputs):
        # Where there are several, they may belong to other parts than the decoder.
        if len(names) != 1:
            continue
        found = shapes[names[0]]
        if len(found) != len(sizes) or any(size not in (0, side) for size, side in zip(sizes, found, strict=True)):
            wanted = " x ".join(str(size or "any") for size in sizes)
            raise InvalidModel(
                f"{names[0]} has shape {list(found)}, the sizes in config.json ask for {wanted}; "
                "config and weights must belong together"
            )


def _is_tied(config: Mapping[str, Any], names: Iterable[str] | None) -> bool:
    """Whether one table serves as embedding and as output projection: as config.json says, else as the model's class
    does by default."""
    if text_config(config).get("model_type") in NEVER_TIED:
        return False
    for source in (config, text_config(config)):
        if isinstance(source.get("tie_word_embeddings"), bool):
            return bool(source["tie_word_embeddings"])
    if config.get("model_type") in TIED_BY_DEFAULT:
        return True
    # A folder without a projection can only be tied.
    return names is not None and not any(is_output_projection(name) for name in names)


def _experts(text: Mapping[str, Any]) -> ExpertShape | None:
    if text.get("is_moe") is False:
        return None
    if isinstance(text.get("ffn_config"), dict):
        text = {**text, **text["ffn_config"]}
    num_experts = config_count(text, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if not num_experts:
        return None
    inner_size = config_count(text, *_EXPERT_SIZES)
    computes_all = text.get("model_type") in _COMPUTES_ALL_EXPERTS
    num_shared = config_count(text, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts") or computes_all
    return ExpertShape(
        num_experts=num_experts,
        num_experts_per_token=config_count(text, *_EXPERTS_PER_TOKEN) or 1,
        intermediate_size=inner_size,
        shared_intermediate_size=config_count(text, "shared_expert_intermediate_size") or num_shared * inner_size,
        computes_all=computes_all,
    )


def _needs_masks(text: Mapping[str, Any]) -> bool:
    drops = any("att" in n and "drop" in n and isinstance(v, (int, float)) and v > 0 for n, v in text.items())
    return drops or text.get("model_type") in MASKED_ATTENTION


def _score_planes(text: Mapping[str, Any], num_heads: int, *, on_gpu: bool) -> int:
    if not _needs_masks(text):
        return 0
    is_asked_for = "eager" in (text.get("attn_implementation"), text.get("_attn_implementation"))
    is_unfused = is_asked_for or text.get("model_type") in UNFUSED_ATTENTION
    if not is_unfused and not on_gpu:
        # A CPU has no fused attention for values of another size than queries and keys.
        query_size = config_count(text, "qk_nope_head_dim") + config_count(text, "qk_rope_head_dim")
        is_unfused = 0 < query_size != config_count(text, "v_head_dim") > 0
    if text.get("attn_logit_softcapping") is not None:
        return 0
    planes_per_head = _PLANES_PER_HEAD.get(str(text.get("model_type")), 1)
    # An indexer scores every pair of tokens as well.
    return planes_per_head * num_heads * is_unfused + config_count(text, "index_n_heads")
