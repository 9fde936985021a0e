"""The model and the data of another tool's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from horizon_client.importing.imported import Imported, Outcome

if TYPE_CHECKING:
    from horizon_client.importing.conversion import Settings

_MODEL = ("base_model", "model_name_or_path", "model_name", "model_id")
_FILE_ENDINGS = (".jsonl", ".json", ".parquet", ".txt", ".gz", ".zst")
# Of Axolotl's types.
_FORMATS = {
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "chat_template": "messages",
    "completion": "text",
    "input_output": "messages",
}
_COLUMNS = {
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_system": "system",
    "field_messages": "messages",
    "field": "text",
    "dataset_text_field": "text",
}
_ANSWER_COLUMNS = {"field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected"}
_PLACEHOLDER = "./train.jsonl"
_DOWNLOAD = "download it, convert it to JSON lines or Parquet where it is not, and name the file here"


def read_data(settings: Settings, imported: Imported) -> None:
    """Carry over which model is trained on what."""
    source, value = settings.take(*_MODEL)
    for other in _MODEL:
        settings.take(other)
    if source:
        text = "a folder on this machine is pushed; else it is the name of a model on the server (horizon model list)"
        imported.put(
            "model", str(value), f"{source}: {value}", text, Outcome.CHECK if "/" in str(value) else Outcome.CARRIED
        )
    else:
        imported.put("model", "my-model", "no model", "", Outcome.CARRIED)
        imported.say(Outcome.MISSING, "no model", "the config names none: set model")
    if settings.has("pretraining_dataset"):
        imported.put("method", "pretrain", "pretraining_dataset")
    source, value = settings.take("datasets", "pretraining_dataset")
    if source:
        _axolotl(source, value, imported, has_pairs=settings.has("rl"))
        return
    source, value = settings.take("dataset", "dataset_name", "train_file", "data_path", "data_files")
    for name, field in _COLUMNS.items():
        column_source, column = settings.take(name)
        if column_source and str(column) != field:
            imported.put("map", {**imported.fields.get("map", {}), field: str(column)}, f"{column_source}: {column}")
    if not source:
        imported.put("dataset", _PLACEHOLDER, "no dataset", "", Outcome.CARRIED)
        imported.say(Outcome.MISSING, "no dataset", "the config names none: set dataset to your file")
    elif _is_file(value):
        imported.put("dataset", str(value), f"{source}: {value}")
    else:
        imported.put("dataset", _PLACEHOLDER, f"{source}: {value}", "", Outcome.CARRIED)
        what = "a name of dataset_info.json" if settings.tool.name == "llama-factory" else "a dataset of the Hub"
        imported.say(Outcome.MISSING, f"{source}: {value}", f"is {what}: {_DOWNLOAD}")


def _axolotl(source: str, value: Any, imported: Imported, *, has_pairs: bool) -> None:
    entries = [
        entry if isinstance(entry, Mapping) else {"path": entry}
        for entry in (value if isinstance(value, list) else [value])
    ]
    paths = [str(entry.get("path", "")) for entry in entries]
    if not paths or not all(map(_is_file, paths)):
        shown = ", ".join(paths)
        imported.put("dataset", _PLACEHOLDER, f"{source}: {shown}", "", Outcome.CARRIED)
        imported.say(Outcome.MISSING, f"{source}: {shown}", f"not files of this machine: {_DOWNLOAD}")
    else:
        imported.put("dataset", paths[0] if len(paths) == 1 else paths, f"{source}: {', '.join(paths)}")
    types = {str(entry.get("type") or "") for entry in entries}
    only = types.pop() if len(types) == 1 else ""
    # Pairs and labelled answers are recognised by their rows.
    format_name = None if has_pairs else _FORMATS.get(only.split(".")[0])
    if format_name:
        imported.put("format", format_name, f"{source}.type: {only}")
    elif only or types:
        shown = ", ".join(sorted({only, *types} - {""}))
        text = "the format is recognised by the rows; rows of several formats need a dataset each"
        imported.say(Outcome.CHECK, f"{source}.type: {shown}", text)
    columns = {
        field: str(entry[name])
        for entry in entries
        for name, field in (_ANSWER_COLUMNS if has_pairs else _COLUMNS).items()
        if entry.get(name) and str(entry[name]) != field
    }
    if columns:
        imported.put("map", columns, f"{source}.field_*")
    known = {"path", "type", "ds_type", "split", *(_ANSWER_COLUMNS if has_pairs else _COLUMNS)}
    if more := sorted({str(name) for entry in entries for name, given in entry.items() if given and name not in known}):
        text = "not read: roles and templates are the model's own; look with horizon dataset preview"
        imported.say(Outcome.CHECK, f"{source}: {', '.join(more)}", text)


def _is_file(value: Any) -> bool:
    return isinstance(value, str) and value.endswith(_FILE_ENDINGS) and "://" not in value
