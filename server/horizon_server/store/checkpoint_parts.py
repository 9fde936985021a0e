"""Where the parts of a checkpoint of adapters are in its folder, by what `checkpoint.export` asked for. Torch-free.

| export | the folder itself | merged/ | trainer/adapter/ |
| --- | --- | --- | --- |
| adapter | the adapter, as a PEFT folder | | |
| both | the adapter, as a PEFT folder | the merged model | |
| merged | the merged model | | the adapter |

transformers takes a folder with an adapter for that adapter, so the two are never in one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from horizon_server.store.adapter_files import ADAPTER_FILE
from horizon_server.store.manifest import TRAINER_FOLDER
from horizon_server.store.model_files import CONFIG_FILE

Export = Literal["adapter", "merged", "both"]
MergeBase = Literal["trained", "source"]
"""What an adapter is merged into: the base as it was trained on, which may be rounded to fewer bits, or the model
folder's own weights."""

MERGED_FOLDER = "merged"
NEW_MERGED_FOLDER = "merged.new"
"""A complete merged model that is about to take the place of another; the checkpoint does not list it."""
ADAPTER_PREFIX: Mapping[Export, str] = {"adapter": "", "both": "", "merged": f"{TRAINER_FOLDER}/adapter/"}
MERGED_PREFIX: Mapping[Export, str] = {"both": f"{MERGED_FOLDER}/", "merged": ""}


def adapter_part(files: Collection[str]) -> str | None:
    """What comes before the names of the adapter's files; None where the checkpoint is not one of adapters."""
    return next(
        (prefix for prefix in dict.fromkeys(ADAPTER_PREFIX.values()) if f"{prefix}{ADAPTER_FILE}" in files), None
    )


def model_part(files: Collection[str]) -> str | None:
    """What comes before the names of the files of a whole model; None where there are adapters alone."""
    return next((prefix for prefix in ("", f"{MERGED_FOLDER}/") if f"{prefix}{CONFIG_FILE}" in files), None)
