"""A transformers model as structure without storage: how it is built, which layers are equal, and what it keeps between
calls."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    __version__,
)

from horizon_server.errors import InvalidModel
from horizon_server.store.model_files import CONFIG_FILE, read_config

_OF_OTHER_HEADS = ("classif", "summary_")
_SIMPLE = (bool, int, float, str, type(None))
_POSITION_ATTRIBUTES = frozenset({"layer_idx", "layer_index"})
_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)


class _EmptyTensorsOnMeta(TorchFunctionMode):
    """Sends `torch.empty` to the meta device: that is how modules make parameters, while buffers are made from
    values."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            return func(*args, **{**(kwargs or {}), "device": "meta"})
        return func(*args, **(kwargs or {}))


def load_config(folder: Path) -> PretrainedConfig:
    """The config of a model folder, never running code from it.

    Raises:
        InvalidModel: no config.json there, or not one of a model that transformers knows.
    """
    model_type = read_config(folder).get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise InvalidModel(
            f": model_type is {model_type!r}, which transformers {__version__} does not "
            "know; models that bring their own code are not supported",
            file=folder / CONFIG_FILE,
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, OSError, StrictDataclassError) as error:
        what = " ".join(str(error).split())
        raise InvalidModel(f"is not the config of a {model_type} model: {what}", file=folder / CONFIG_FILE) from error
    return config


def build_meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """The causal language model of a config, in evaluation mode: parameters on the meta device, buffers real.

    Raises:
        InvalidModel: transformers has no causal language model for the config, or the model needs a buffer that only
            its checkpoint holds.
    """
    _refuse_settings(config)
    config = copy.deepcopy(config)
    # Caches are for generation; the engine reads outputs by name.
    config.use_cache = False
    config.return_dict = True
    if config._attn_implementation not in ("eager", "sdpa"):
        # The folder's choice is one of speed (flash_attention_2, a kernel of the hub) and needs packages that may not
        # be here.
        config._attn_implementation = None
    # The engine reads the hidden state alone. Set only where they are on: not every config has them.
    for extra in ("output_attentions", "output_hidden_states", "output_router_logits"):
        if getattr(config, extra, False):
            setattr(config, extra, False)
    try:
        with _EmptyTensorsOnMeta():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=torch.float32, trust_remote_code=False
            )
    except ValueError as error:
        what = f"transformers {__version__} refuses the config of this {config.model_type} model"
        raise InvalidModel(f"{what}: {' '.join(str(error).split())}") from error
    on_meta: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                # One for each: tied parameters stay tied.
                module._parameters[name] = on_meta.setdefault(id(parameter), nn.Parameter(parameter.to("meta")))
    stored = checkpoint_tensors(model)
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in stored:
            raise InvalidModel(f"buffer {name} cannot be computed from the config; this model is not supported")
    model.train(False)
    # The engine differentiates by its own leaves, which are views into streamed weights.
    model.requires_grad_(False)
    return model


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint of the model holds: its parameters, and the floating-point buffers it does not compute
    again."""
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}


def tensors_of_config(folder: Path) -> list[tuple[str, str, list[int]]]:
    """Return name, format and shape of each tensor that a checkpoint of a config.json has; the weights need not be
    there. The format is the one that the config names, bf16 where it names none.

    Raises:
        InvalidModel: as `load_config` and `build_meta_model` do.
    """
    config = load_config(folder)
    dtype = {torch.float32: "F32", torch.float16: "F16"}.get(config.dtype, "BF16")
    # One name for tensors that are tied: a folder holds them once.
    once = {
        id(tensor): (name, tensor) for name, tensor in reversed(checkpoint_tensors(build_meta_model(config)).items())
    }
    return [(name, dtype, list(tensor.shape)) for name, tensor in reversed(once.values())]


def max_positions(config: PretrainedConfig) -> int | None:
    """The longest document that a config allows, in tokens, or None where it sets no limit."""
    text = config.get_text_config()
    # dbrx calls it max_seq_len.
    limits = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


def draws_random_numbers(config: PretrainedConfig) -> bool:
    """Whether a config asks for dropout or router noise anywhere, which training mode then brings."""
    # No layer and no language model's head uses those of classifiers (gpt_neox, gpt_neo) and of summaries (gpt2).
    settings = ((n, v) for n, v in _numbers(config.get_text_config().to_dict()) if not n.startswith(_OF_OTHER_HEADS))
    return any(value > 0 and any(part in name for part in ("dropout", "pdrop", "jitter")) for name, value in settings)


def _numbers(settings: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a config with their names, those of its parts (`attn_config`) too."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, (int, float)):
            yield name, value


def _refuse_settings(config: PretrainedConfig) -> None:
    """Refuse models that are not decoders, and what a config asks for that the layer-by-layer schedule would leave
    out."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InvalidModel(
            f"model_type {config.model_type!r} cannot be trained: transformers {__version__} has no causal language "
            "model for it"
        )
    if config.is_encoder_decoder:
        raise InvalidModel(
            f"model_type {config.model_type!r} is an encoder-decoder (config.json: is_encoder_decoder); "
            "only decoder-only language models can be trained"
        )
    for name, value in _numbers(config.get_text_config().to_dict()):
        if "layerdrop" in name and not name.startswith("encoder") and value > 0:
            raise InvalidModel(
                f"config.json sets {name} to {value}, which skips whole layers at random, and that is not supported; "
                "set it to 0"
            )
    # transformers adds the routers' loss only where the config asks for their logits. It joins the routers of all
    # layers, which are never on the device together.
    weighted = any(getattr(config, name, None) for name in ("router_aux_loss_coef", "aux_loss_coef"))
    if getattr(config, "output_router_logits", False) and weighted:
        raise InvalidModel(
            "config.json sets output_router_logits, which adds the routers' auxiliary loss, and that is not supported; "
            "set it to false to train without, as transformers does by default"
        )


def find_layer_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The decoder's layer list and its full name, such as `model.layers`.

    It is the one with most parameters among the lists that are not inside another list.

    Raises:
        InvalidModel: the model has no such list, or more than one.
    """
    lists = [
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)
    ]
    outer = [(n, m) for n, m in lists if not any(n.startswith(other + ".") for other, _ in lists)]
    sizes = {name: sum(parameter.numel() for parameter in module.parameters()) for name, module in outer}
    found = [(n, m) for n, m in outer if sizes[n] == max(sizes.values())]
    if len(found) != 1:
        lists_found = f"{len(found)} lists of equal size: {', '.join(name for name, _ in found)}" if found else "none"
        raise InvalidModel(
            f"model_type {model.config.model_type!r}: its decoder layers must be in one list, and this model has "
            f"{lists_found}"
        )
    return found[0]


def layer_signature(layer: nn.Module) -> tuple[object, ...]:
    """Equal for two layers exactly when one can be run in place of the other: same classes, settings, shapes and
    buffers.

    The layer's own position does not count. Anything that is not a plain value counts by identity, so that in doubt
    layers are kept apart.
    """
    signature: list[object] = []
    for path, module in layer.named_modules():
        signature.append((path, type(module)))
        for name, value in sorted(vars(module).items()):
            if name not in _MODULE_ATTRIBUTES and name not in _POSITION_ATTRIBUTES:
                signature.append((name, _comparable(value)))
        signature.extend((name, tuple(p.shape)) for name, p in module.named_parameters(recurse=False))
        for name, buffer in module.named_buffers(recurse=False):
            # A buffer of the checkpoint is given with every call, so that only its shape must be equal.
            stored = name not in module._non_persistent_buffers_set and buffer.is_floating_point()
            signature.append((name, buffer.dtype, tuple(buffer.shape), "" if stored else _digest(buffer)))
    return tuple(signature)


def _digest(buffer: Tensor) -> str:
    """Of a buffer's values: as Python's numbers, a mask over all pairs of positions would take eight times its
    memory."""
    return hashlib.sha256(buffer.detach().flatten().contiguous().view(torch.uint8).numpy().data).hexdigest()


def _comparable(value: object) -> object:
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_comparable(item) for item in value)
    if isinstance(value, functools.partial):
        return (
            value.func,
            _comparable(value.args),
            tuple((k, _comparable(v)) for k, v in sorted(value.keywords.items())),
        )
    return id(value)


@dataclass
class _KeptBuffer:
    """A buffer, a copy of its content, and the version that autograd gave the buffer when it had that content."""

    buffer: Tensor
    content: Tensor
    version: int


class ModuleState:
    """The buffers and plain attributes of some modules as they are now, put back after each call.

    Some modules of transformers change themselves when they run: a rotary table grows with the longest position it has
    seen, or is overwritten with other factors. A later call would then depend on an earlier one, and a resumed run on
    where it was stopped. Thread: the thread that calls the modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # Not the training mode, which is switched between calls on purpose.
        self._modules: list[tuple[nn.Module, dict[str, object], dict[str, _KeptBuffer]]] = []
        for module in modules:
            attributes = {name: value for name, value in vars(module).items() if name != "training"}
            # A buffer without storage belongs to the checkpoint: each call is given its values, so there is nothing to
            # keep.
            buffers = {
                name: _KeptBuffer(buffer=buffer, content=buffer.clone(), version=buffer._version)
                for name, buffer in module.named_buffers(recurse=False)
                if not buffer.is_meta
            }
            self._modules.append((module, attributes, buffers))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put the modules back when the block ends."""
        try:
            yield
        finally:
            # Also after an error: the trials of a template run code that may fail halfway.
            for module, attributes, buffers in self._modules:
                _restore(module, attributes, buffers)

    def place(self, place: Callable[[Tensor], Tensor]) -> None:
        """Move the buffers to where compute reads them."""
        for module, _, buffers in self._modules:
            for name, kept in buffers.items():
                buffer, content = place(kept.buffer), place(kept.content)
                buffers[name] = _KeptBuffer(buffer=buffer, content=content, version=buffer._version)
                module._buffers[name] = buffer


def _restore(module: nn.Module, attributes: dict[str, object], buffers: dict[str, _KeptBuffer]) -> None:
    current = vars(module)
    # Compared by number first: this runs for every call of a layer.
    if len(current) != len(attributes) + 1:
        for name in [name for name in current if name not in attributes and name != "training"]:
            del current[name]
    for name, value in attributes.items():
        if current.get(name) is not value:
            current[name] = value
    for name, kept in buffers.items():
        if kept.buffer._version != kept.version:
            # Into a new tensor: backward may still need what the call wrote into the old one.
            with torch.no_grad():
                kept.buffer = kept.content.clone()
            kept.version = kept.buffer._version
        if module._buffers.get(name) is not kept.buffer:
            module._buffers[name] = kept.buffer
    for name, buffer in list(module._buffers.items()):
        if name not in buffers and buffer is not None and not buffer.is_meta:
            del module._buffers[name]


def ends_of(model: PreTrainedModel) -> tuple[nn.Embedding, nn.Linear]:
    """Return the embedding table and the output projection. Raises InvalidModel: they are something else."""
    table: object = model.get_input_embeddings()
    projection: object = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(table, nn.Embedding) or not isinstance(projection, nn.Linear):
        kinds = f"{type(table).__name__} and {type(projection).__name__}"
        raise InvalidModel(f"a model whose ends are {kinds}, not an embedding table and a projection, is not supported")
    return table, projection


def stored_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return what a checkpoint in the form of the class would hold; shared tensors once, by their first name."""
    first_names: dict[int, str] = {}
    tensors = checkpoint_tensors(model)
    for name, tensor in tensors.items():
        first_names.setdefault(id(tensor), name)
    return {name: tuple(tensors[name].shape) for name in first_names.values()}
