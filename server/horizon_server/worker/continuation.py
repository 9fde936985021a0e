"""Where an attempt continues: from what a killed worker left in memory, from a checkpoint, or from the model as it was
given."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_server.errors import InvalidSpec
from horizon_server.records.execution import ComputeDtype
from horizon_server.store.adapter_files import read_adapter_folder, read_base_sha256
from horizon_server.store.base_digest import INIT_ADAPTER, check_base
from horizon_server.store.checkpoint import load_checkpoint
from horizon_server.store.generations import KeptState
from horizon_server.store.host_store import HostStore
from horizon_server.store.model_load import load_model


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """The store is loaded; `state` is the trainer's and the worker's with it, None at the model as it was given.

    `unreported` are the figures of the last step, where the worker before this one was killed before it had reported
    them. `refusal` says why memory was not used although it was to be.
    """

    state: dict[str, Any] | None
    from_memory: bool = False
    unreported: dict[str, Any] | None = None
    refusal: str = ""

    @property
    def step(self) -> int:
        """The last step done."""
        return 0 if self.state is None else int(self.state["trainer"]["step"])

    def check(self, *, data: dict[str, Any], compute_dtype: ComputeDtype, job_id: str) -> None:
        """Refuse what would not be continued exactly.

        Raises:
            InvalidSpec: the tokens, their order or the dtype are others now.
        """
        kept = self.state
        assert kept is not None, "there is something to continue"
        # Other data would train too, without an error, but to another result than a run that was never stopped.
        differences = _other_data(kept["data"], data)
        # The step is not the same function in another dtype.
        if (before := kept["compute_dtype"]) != compute_dtype:
            differences.append(
                f"it was made in {before}, and this attempt computes in {compute_dtype} (train.compute_dtype)"
            )
        if differences:
            at = f"{job_id}@{self.step}"
            raise InvalidSpec(
                f"the checkpoint of step {self.step} cannot be continued exactly: {'; '.join(differences)}. Submit a "
                f"new job that starts with its weights: init_from: {at}"
            )


def _other_data(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs in the data of a checkpoint and of this attempt, in words."""
    found = []
    if before["tokens"] != now["tokens"]:
        found.append(f"its tokens are others (their sha256 was {before['tokens'][:12]} and is {now['tokens'][:12]})")
    if before["num_steps"] != now["num_steps"]:
        found.append(f"the job had {before['num_steps']} steps and has {now['num_steps']} now")
    if before["seed"] != now["seed"]:
        found.append(f"its seed was {before['seed']} and is {now['seed']}")
    limits = before["packing_limit"], now["packing_limit"]
    if limits[0] != limits[1]:
        was, is_now = (f"up to {limit} tokens" if limit else "without a limit" for limit in limits)
        found.append(f"its rows were packed {was}, and are {is_now} now")
    # Which steps the digest is of depends on how many there are.
    elif before["num_steps"] == now["num_steps"] and before["rows"] != now["rows"]:
        found.append("its documents were in another order")
    return found


def load(
    store: HostStore,
    *,
    model: Path,
    resume_from: Path | None,
    from_memory: bool,
    seed: int = 0,
    adapter: Path | None = None,
    base_sha256: Callable[[], str] | None = None,
) -> Continuation:
    """Have the weights in the store: those that are in memory, where that is wanted and they are whole, else from disk.
    New adapters are those of the folder `adapter`, or begin at random by `seed`; `base_sha256` gives the digest of the
    model that they are for.

    Raises:
        InvalidModel: the checkpoint, the adapter or the model's folder cannot be used.
    """
    refusal = ""
    if from_memory:
        found = store.find_kept()
        if isinstance(found, KeptState):
            state = json.loads(found.text)
            figures = state.pop("figures")
            return Continuation(state=state, from_memory=True, unreported=None if found.reported else figures)
        refusal = found
    # First: a worker that is killed while it loads leaves weights of no step.
    store.start_loading()
    if resume_from is not None:
        state = load_checkpoint(store, resume_from, base=model, base_sha256=base_sha256)
        return Continuation(state=state, refusal=refusal)
    adapters = None
    if adapter is not None:
        assert base_sha256 is not None, "a job that starts with an adapter trains adapters"
        # The model's files may have changed since the job was submitted, when this was compared.
        if wanted := read_base_sha256(adapter):
            check_base(INIT_ADAPTER, wanted, base_sha256())
        names = {place.name for _, place in store.layout.tensors() if place.adapts}
        adapters = read_adapter_folder(adapter).tensors(names)
    load_model(store, model, seed=seed, adapters=adapters)
    return Continuation(state=None, refusal=refusal)
