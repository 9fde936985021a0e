"""Why a job does not fit, and what would make it fit: the change to its spec that costs the least time, found by
planning the job with each. Loads no torch."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from horizon_server.errors import InvalidSpec
from horizon_server.planning.asked import with_spec
from horizon_server.planning.case import Case, placed
from horizon_server.planning.chunks import SUGGESTED_CHUNKS, check_chunks
from horizon_server.planning.drives import check_drives, check_wear, drive_use
from horizon_server.planning.pages import check_pages
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.execution import Execution, Parallel
from horizon_server.records.plan import DriveUse, Ledger, StepPrediction
from horizon_server.spec import EVERYTHING, LORA, parse_job_spec
from horizon_server.texts import size_text

_Change = Mapping[str, Mapping[str, Any]]
"""Sections of a spec with the fields that change."""

_COMPRESSED: _Change = {"train": {"optimizer_states": "compressed"}}
_DRIVE: _Change = {"memory": {"tier": "drive"}}
_PAGED: _Change = {"memory": {"experts": "paged"}}


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """A job that a change makes fit."""

    change: _Change
    ledger: Ledger
    prediction: StepPrediction | None
    use: DriveUse | None

    @property
    def step_s(self) -> float:
        """Seconds of a step, where that is known."""
        return math.inf if self.prediction is None else self.prediction.step_s


def why_not(case: Case, execution: Execution, ledger: Ledger, others: Sequence[Parallel]) -> str:
    """Return why a job does not fit, with the numbers and the change that would make it fit and costs the least time;
    `others` are ways to divide a step that fit."""
    need, limit_bytes = ledger.host_total_bytes, case.host_limit_bytes
    if need > limit_bytes:
        short = f"the job needs {size_text(need)} of host memory and {size_text(limit_bytes)} are available"
    else:
        arena, allowed = ledger.device_total_bytes, execution.device_limit_bytes
        short = f"the job needs {size_text(arena)} on the device and {size_text(allowed)} are allowed"
    if others:
        return f"{short}; it would fit with train.parallel: {others[0]}"
    if (fit := _cheapest(case, execution)) is not None:
        return f"{short}; it would fit with {_text(fit, ledger, limit_bytes)}"
    store = sum(ledger.host_bytes[part] for part in ("weights", "moments", "gradients"))
    if store > limit_bytes:
        billions = case.folder.layout.num_parameters / 1e9
        held = f"{size_text(store)} of it hold the {billions:.2f} B parameters and their moments"
        return f"{short}; {held}: {_smaller(case, execution)}"
    return f"{short}; {_shorter(case, execution)}"


def _cheapest(case: Case, execution: Execution) -> _Fit | None:
    """Of the changes that make the job fit and learn the same, or nearly, the one with the shortest steps: changes of
    one kind of memory, and of both kinds where none is enough. None where nothing makes it fit."""
    chunks = _chunks(case, execution)
    of_host: list[Sequence[_Change]] = [(_COMPRESSED,), (_DRIVE,), (_COMPRESSED, _DRIVE)]
    # The largest chunks that fit are the fastest.
    of_device = itertools.chain([(_PAGED,)], ((chunk,) for chunk in chunks))
    found = [fit for changes in of_host if (fit := _with(case, execution, changes)) is not None]
    found += itertools.islice(_fitting(case, execution, of_device), 1)
    if not found:
        both = [(*some, other) for some in of_host for other in (_PAGED, *chunks)]
        found = list(_fitting(case, execution, both))
    return min(found, key=lambda fit: fit.step_s, default=None)


def _chunks(case: Case, execution: Execution) -> list[_Change]:
    """The chunks to try, the largest first."""
    now, tried = execution.chunk_tokens, list[_Change]()
    for num_tokens in SUGGESTED_CHUNKS:
        has_effect = case.chunked_tokens(dataclasses.replace(execution, chunk_tokens=num_tokens)) > 0
        if has_effect and (not now or num_tokens < now):
            tried.append({"train": {"chunk_tokens": num_tokens}})
    return tried


def _fitting(case: Case, execution: Execution, tried: Iterable[Sequence[_Change]]) -> Iterator[_Fit]:
    return (fit for changes in tried if (fit := _with(case, execution, changes)) is not None)


def _with(case: Case, execution: Execution, changes: Sequence[_Change]) -> _Fit | None:
    """The job with changes to its spec; None where it does not fit, or cannot have them."""
    change: dict[str, dict[str, Any]] = {}
    for one in changes:
        for section, fields in one.items():
            change.setdefault(section, {}).update(fields)
    if _has(case, change):
        return None
    with suppress(InvalidSpec):
        changed = _changed(case, change)
        wanted = with_spec(execution, changed.spec)
        check_drives(changed.spec, case.drives)
        check_chunks(changed.folder, changed.spec)
        check_pages(changed.folder, wanted)
        wanted = placed(changed, wanted)
        ledger = changed.ledger(wanted)
        if not changed.fits(ledger, wanted):
            return None
        use = drive_use(changed.folder, wanted, case.drives, case.num_steps)
        try:
            check_wear(changed.spec, use, case.drives)
        except InvalidSpec:
            change.setdefault("memory", {})["accept_wear"] = True
        prediction = changed.prediction(wanted)
        return _Fit(change=change, ledger=ledger, prediction=prediction, use=use)
    return None


def _has(case: Case, change: _Change) -> bool:
    """Whether the job has one of the fields already."""
    return any(
        getattr(getattr(case.spec, section), name) == value
        for section, fields in change.items()
        for name, value in fields.items()
    )


def _changed(case: Case, change: _Change) -> Case:
    """The case of a job with another spec. Raises InvalidSpec where it cannot be."""
    plain = case.spec.to_mapping()
    spec = parse_job_spec(plain | {section: plain[section] | dict(fields) for section, fields in change.items()})
    # Nothing else in a change decides the layout.
    has_layout = not {"optimizer_states", "trainable"} & set(change.get("train", ()))
    folder = case.folder if has_layout else open_for_training(case.folder.path, spec.train)
    return dataclasses.replace(case, spec=spec, folder=folder)


def _text(fit: _Fit, before: Ledger, host_limit_bytes: int) -> str:
    """The fields to set, with what they bring and cost."""
    fields = [
        f"{section}.{name}: {str(value).lower() if isinstance(value, bool) else value}"
        for section, of in fit.change.items()
        for name, value in of.items()
    ]
    costs = []
    if fit.use is not None:
        costs.append(fit.use.text)
    if before.host_total_bytes <= host_limit_bytes:
        on_device, instead = (size_text(one.device_total_bytes) for one in (fit.ledger, before))
        costs.append(f"{on_device} on the device instead of {instead}")
    costs.append(f"{size_text(fit.ledger.host_total_bytes)} of host memory")
    if fit.prediction is not None:
        costs.append(f"{fit.prediction.step_s:,.3g} s a step")
    return f"{' and '.join(fields)} ({', '.join(costs)})"


def _smaller(case: Case, execution: Execution) -> str:
    """What to do where the store alone does not fit: train adapters, where that fits."""
    if case.spec.train.trainable != EVERYTHING:
        return "only a smaller model fits"
    with suppress(InvalidSpec):
        adapted = _changed(case, {"train": {"trainable": list(LORA), "lr_groups": []}})
        found = placed(adapted, execution)
        ledger = adapted.ledger(found)
        what = f"train.trainable: lora (adapters next to the frozen model) needs {size_text(ledger.host_total_bytes)}"
        return f"{what}, which fits" if adapted.fits(ledger, found) else f"only a smaller model fits; {what}"
    return "only a smaller model fits"


def _shorter(case: Case, execution: Execution) -> str:
    """What to do where a step's tokens do not fit: have fewer."""
    tokens, sequence_length = case.spec.train.tokens_per_step, case.spec.train.sequence_length
    while tokens > 8:
        tokens //= 2
        length = min(sequence_length, tokens)
        smaller = case.with_train(tokens_per_step=tokens, sequence_length=length)
        found = placed(smaller, execution)
        if smaller.fits(smaller.ledger(found), found):
            shorter = f" and train.sequence_length: {length}" if length < sequence_length else ""
            return f"it would fit with train.tokens_per_step: {tokens}{shorter}"
    return "no smaller train.tokens_per_step makes it fit; use a smaller model or a node with more memory"
