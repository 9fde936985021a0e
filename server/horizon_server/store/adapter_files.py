"""Adapter folders as PEFT writes and reads them: adapter_model.safetensors and adapter_config.json. Torch-free; no
pickle is ever read.

A tensor `X.weight` of the model has the adapter `base_model.model.X.lora_A.weight` [rank, inputs] and
`...lora_B.weight` [outputs, rank], with DoRA `...lora_magnitude_vector` [outputs] too. What a config asks for beyond
LoRA, rsLoRA and DoRA is refused by name: leaving it out in silence would train or merge another model.

Source: https://huggingface.co/docs/peft, checkpoint format.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from horizon_formats.model_files import ADAPTER_BASE_FILE, ADAPTER_WEIGHTS_FILE
from horizon_formats.model_files import ADAPTER_CONFIG_FILE as ADAPTER_CONFIG_FILE
from horizon_server.errors import InvalidModel
from horizon_server.store.adapters import LORA_A, LORA_B, MAGNITUDE
from horizon_server.store.safetensors_files import TensorHeader, read_safetensors_headers

ADAPTER_FILE = ADAPTER_WEIGHTS_FILE
ADAPTER_STEM = ADAPTER_FILE.removesuffix(".safetensors")
PEFT_LORA = "peft-lora"
"""What a pushed adapter has where a pushed model has its architecture."""

BASE_SHA256_FILE = ADAPTER_BASE_FILE
"""In a folder of an adapter that horizon has written: the `base_digest.model_digest` of the model that it was trained
on."""

MAX_ADAPTER_CONFIG_BYTES = 1 << 20
MAX_ADAPTER_RANK = 4096

PEFT_PREFIX = "base_model.model."
"""Before the name of every tensor in an adapter's file."""
_WEIGHT = ".weight"
_DIGEST, _MAX_DIGEST_BYTES = re.compile("[0-9a-f]{64}"), 100
_DTYPES = ("F32", "F16", "BF16")

# Of these, any value says nothing about what the adapter computes.
_INFORMATION = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_dora",
        "use_rslora",
    }
)
_MERGE_FIRST = "merge the adapter into its base with PEFT (merge_and_unload), and push the merged model instead"
# Options of PEFT that change what is computed, with what to do about each; any other one that is set is refused too.
_ADVICE: Mapping[str, str] = {
    "modules_to_save": "it trains whole modules besides the adapters; save an adapter without it",
    "rank_pattern": "the ranks of an adapter must all be r; save an adapter without it",
    "alpha_pattern": "the scales of an adapter must all be lora_alpha's; save an adapter without it",
    "target_parameters": "adapters on parameters that are no linear maps, such as experts in one tensor, are not "
    "supported; train the "
    f"experts themselves, without adapters (train.trainable: [experts]), or {_MERGE_FIRST}",
    "bias": "only none is supported; save an adapter that trains no biases",
}


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """What adapter_config.json says of LoRA. `transposed` is PEFT's fan_in_fan_out: the base's weights are [inputs,
    outputs]."""

    rank: int
    alpha: float
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    transposed: bool = False
    base: str = ""

    @property
    def scale(self) -> float:
        """What the product B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class AdapterHeaders(NamedTuple):
    """The tensors of one adapted weight: A [rank, inputs], B [outputs, rank], and with DoRA its magnitudes
    [outputs]."""

    a: TensorHeader
    b: TensorHeader
    magnitude: TensorHeader | None = None

    @property
    def present(self) -> list[TensorHeader]:
        """Those that are there."""
        return [header for header in self if header is not None]


@dataclass(frozen=True, kw_only=True)
class AdapterFolder:
    """A folder that was read and checked; `adapters` are by the module that they adapt, as PEFT names it."""

    path: Path
    config: AdapterConfig
    adapters: Mapping[str, AdapterHeaders]

    @property
    def num_parameters(self) -> int:
        """Of all adapters together."""
        return sum(math.prod(header.shape) for found in self.adapters.values() for header in found.present)

    def tensors(self, names: Container[str]) -> dict[str, TensorHeader]:
        """All tensors by what they are called in the store, `names`, in the order of the file."""
        headers = sorted(
            (h for found in self.adapters.values() for h in found.present), key=lambda header: header.start
        )
        # A folder of a base class lacks the first parts of the names that PEFT has.
        stored = [_longest_end(header.name, names) or header.name for header in headers]
        return {name: replace(header, name=name) for name, header in zip(stored, headers, strict=True)}

    def of_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, AdapterHeaders]:
        """The adapters by the name of the base's tensor that they are for; `shapes` are the base's.

        Raises:
            InvalidModel: a tensor that is adapted is not in the base, or has another shape there; it is named.
        """
        found: dict[str, AdapterHeaders] = {}
        for module, headers in self.adapters.items():
            name = _base_tensor(module, shapes)
            if name is None:
                raise InvalidModel(
                    f": the adapter is for {module}, which the base model does not have; give the base that it was "
                    "trained on",
                    file=self.path,
                )
            wanted = headers.b.shape[0], headers.a.shape[1]
            if self.config.transposed:
                wanted = wanted[::-1]
            if shapes[name] != wanted:
                raise InvalidModel(
                    f": the adapter of {module} is for a weight of shape {list(wanted)}, the base's is "
                    f"{list(shapes[name])}; "
                    "give the base that it was trained on",
                    file=self.path,
                )
            found[name] = headers
        return found


def read_base_sha256(folder: Path) -> str:
    """The digest of the model that an adapter was trained on; empty where its folder does not say. Raises
    InvalidModel."""
    file = folder / BASE_SHA256_FILE
    if not file.is_file():
        return ""
    with file.open("rb") as stream:
        # The file may be anybody's, of any size.
        text = stream.read(_MAX_DIGEST_BYTES).decode("ascii", errors="replace").strip()
    if not _DIGEST.fullmatch(text):
        raise InvalidModel(
            "must hold a sha256, 64 digits from 0 to 9 and a to f; copy the adapter again, or leave the file out",
            file=file,
        )
    return text


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder holds an adapter, by the name of its config."""
    return (folder / ADAPTER_CONFIG_FILE).is_file()


def peft_keys(module: str, *, dora: bool = False) -> tuple[str, ...]:
    """The names of A and B in adapter_model.safetensors, and with `dora` that of the magnitudes."""
    ends = (LORA_A, LORA_B, MAGNITUDE) if dora else (LORA_A, LORA_B)
    return tuple(f"{PEFT_PREFIX}{module}{end}" for end in ends)


def adapter_config_text(config: AdapterConfig, adapted: Iterable[str], modules: Iterable[str]) -> str:
    """The content of adapter_config.json for the `adapted` of a model's `modules`, by their names."""
    alpha = int(config.alpha) if config.alpha == int(config.alpha) else config.alpha
    document = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": alpha,
        "lora_dropout": config.dropout,
        "use_dora": config.dora,
        "use_rslora": config.rslora,
        "fan_in_fan_out": config.transposed,
        "bias": "none",
        "target_modules": _targets(set(adapted), set(modules)),
    }
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def read_adapter_folder(folder: Path) -> AdapterFolder:
    """Read the config and the header of an adapter, with every check; no weight is read.

    Raises:
        InvalidModel: a file is missing or malformed, or the config asks for what is not supported; the file and the
            option are named.
    """
    config = _read_config(folder / ADAPTER_CONFIG_FILE)
    if not (folder / ADAPTER_FILE).is_file():
        raise InvalidModel(
            f"has no {ADAPTER_FILE}; save the adapter as safetensors (save_pretrained writes them, a .bin file is a "
            "pickle and "
            "is never read)",
            file=folder,
        )
    headers = read_safetensors_headers(folder, stem=ADAPTER_STEM)
    adapters: dict[str, AdapterHeaders] = {}
    for name, header in headers.items():
        module = name.removeprefix(PEFT_PREFIX).removesuffix(LORA_A).removesuffix(LORA_B).removesuffix(MAGNITUDE)
        keys = peft_keys(module, dora=config.dora)
        if name not in keys:
            what = "of LoRA with use_dora" if config.dora else "of plain LoRA"
            ends = f"{LORA_A}, {LORA_B} or {MAGNITUDE}" if config.dora else f"{LORA_A} or {LORA_B}"
            raise InvalidModel(
                f": {name} is not a tensor {what} ({PEFT_PREFIX}*{ends}); {_MERGE_FIRST}", file=header.file
            )
        if any(key not in headers for key in keys):
            raise InvalidModel(f": {name} has no counterpart; copy or download the adapter again", file=header.file)
        found = AdapterHeaders(*(headers[key] for key in keys))
        for header in found.present:
            if header.dtype not in _DTYPES:
                raise InvalidModel(
                    f": {header.name} is {header.dtype}; adapters must be float32, float16 or bfloat16",
                    file=header.file,
                )
        a, b = found.a, found.b
        ranks = (a.shape[0], b.shape[1]) if len(a.shape) == len(b.shape) == 2 else ()
        if ranks != (config.rank, config.rank):
            raise InvalidModel(
                f": the adapter of {module} has shapes {list(a.shape)} and {list(b.shape)}; with r {config.rank} they "
                f"must be [{config.rank}, inputs] and [outputs, {config.rank}]",
                file=a.file,
            )
        if found.magnitude is not None and found.magnitude.shape != (b.shape[0],):
            raise InvalidModel(
                f": the magnitudes of {module} have shape {list(found.magnitude.shape)}; they must be [{b.shape[0]}], "
                "one for each "
                "output of the map",
                file=a.file,
            )
        adapters[module] = found
    if not adapters:
        raise InvalidModel("holds no adapter", file=folder / ADAPTER_FILE)
    return AdapterFolder(path=folder, config=config, adapters=adapters)


def _read_config(file: Path) -> AdapterConfig:
    if not file.is_file():
        raise InvalidModel(f"has no {file.name}; give a folder that PEFT's save_pretrained wrote", file=file.parent)
    if file.stat().st_size > MAX_ADAPTER_CONFIG_BYTES:
        raise InvalidModel(f"is larger than {MAX_ADAPTER_CONFIG_BYTES} bytes, which no adapter's config is", file=file)
    try:
        plain = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"is not valid JSON: {error}", file=file) from error
    if not isinstance(plain, dict):
        raise InvalidModel(f"must hold a JSON object, not a {type(plain).__name__}", file=file)
    return parse_adapter_config(plain, file)


def parse_adapter_config(plain: Mapping[str, Any], file: Path = Path(ADAPTER_CONFIG_FILE)) -> AdapterConfig:
    """What the object in an adapter_config.json says; `file` names it in messages. Raises InvalidModel, which names the
    option."""
    if (kind := plain.get("peft_type")) != "LORA":
        raise InvalidModel(f": peft_type is {_shown(kind)}; only LORA is supported, so {_MERGE_FIRST}", file=file)
    for name, value in plain.items():
        # PEFT writes every option that it knows, nearly all of them switched off.
        is_off = value in (None, False, "none") or value == {} or value == []
        if name not in _INFORMATION and name != "megatron_config" and not is_off:
            advice = _ADVICE.get(name, f"that is not supported, so {_MERGE_FIRST}")
            raise InvalidModel(f": {_shown(name)} is {_shown(value)}; {advice}", file=file)
    # Another way to begin changes the base's own weights; what is written with true or false does not.
    started = plain.get("init_lora_weights", True)
    if isinstance(started, str) and started not in ("gaussian", "orthogonal"):
        raise InvalidModel(
            f": init_lora_weights is {_shown(started)}, which changes the base's weights; convert the adapter with "
            "PEFT "
            "(path_initial_model_for_weight_conversion), and push that",
            file=file,
        )
    rank = plain.get("r")
    if type(rank) is not int or not 1 <= rank <= MAX_ADAPTER_RANK:
        raise InvalidModel(f": r is {_shown(rank)}; it must be a whole number from 1 to {MAX_ADAPTER_RANK}", file=file)
    base = plain.get("base_model_name_or_path")
    return AdapterConfig(
        rank=rank,
        alpha=_number(plain, "lora_alpha", file, default=8, high=1e6),
        dropout=_number(plain, "lora_dropout", file, default=0.0, high=1.0),
        rslora=_switch(plain, "use_rslora", file),
        dora=_switch(plain, "use_dora", file),
        transposed=_switch(plain, "fan_in_fan_out", file),
        base=base if isinstance(base, str) else "",
    )


def _number(plain: Mapping[str, Any], name: str, file: Path, *, default: float, high: float) -> float:
    value = plain.get(name, default)
    # isinstance takes True for a number, and NaN is in no range.
    if type(value) not in (int, float) or not 0 <= value <= high:
        raise InvalidModel(f": {name} is {_shown(value)}; it must be a number from 0 to {high:g}", file=file)
    return float(value)


def _switch(plain: Mapping[str, Any], name: str, file: Path) -> bool:
    value = plain.get(name, False)
    if value not in (None, True, False):
        raise InvalidModel(f": {name} is {_shown(value)}; it must be true or false", file=file)
    return bool(value)


def _base_tensor(module: str, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The tensor of a module. A folder of a base class leaves out the first parts of the name that the module has in
    the whole model."""
    return _longest_end(module + _WEIGHT, shapes)


def _longest_end(name: str, known: Container[str]) -> str | None:
    while name:
        if name in known:
            return name
        name = name.partition(".")[2]
    return None


def _targets(adapted: set[str], modules: set[str]) -> list[str]:
    """Last parts of names where they mean exactly the adapted modules, as people write them; else whole names."""
    short = {module.rpartition(".")[2] for module in adapted}
    meant = {module for module in modules if module.rpartition(".")[2] in short}
    return sorted(short if meant <= adapted else adapted)


def _shown(value: object) -> str:
    """A value of a file for a message; ASCII, because some characters cannot be sent on."""
    shown = ascii(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."
