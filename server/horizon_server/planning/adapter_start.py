"""Whether an adapter that a job starts with is the one that `train.lora` asks for. Torch-free."""

from __future__ import annotations

from pathlib import Path

from horizon_server.errors import FieldViolation, InvalidModel, InvalidSpec
from horizon_server.planning.trainable import open_for_training
from horizon_server.spec import TrainSpec
from horizon_server.store.adapter_files import AdapterFolder, read_adapter_folder
from horizon_server.store.adapters import TRANSPOSED
from horizon_server.store.model_files import text_config

_SHOWN = 3


def check_adapter(adapter: Path, model: Path, train: TrainSpec) -> None:
    """Refuse an adapter that differs from what a job trains; `train.lora.dropout` may differ, which only training uses.
    Blocking.

    Raises:
        InvalidModel: the adapter is not of this model.
        InvalidSpec: rank, scale or targets differ; one violation for each, with the value to write.
    """
    folder, found = open_for_training(model, train), read_adapter_folder(adapter)
    try:
        adapted = found.of_weights({name: header.shape for name, header in folder.headers.items()})
    except InvalidModel as error:
        raise InvalidSpec.of("init_from", error.with_names({adapter: "init_from"}).message) from error
    if found.config.transposed != (text_config(folder.config).get("model_type") in TRANSPOSED):
        value = "true" if not found.config.transposed else "false"
        raise InvalidSpec.of(
            "init_from",
            f"init_from: fan_in_fan_out in adapter_config.json must be {value} for this model; correct it and push "
            "again",
        )
    wanted = {tensor.adapts for _, tensor in folder.layout.tensors() if tensor.adapts}
    problems = [*_differences(found, train)]
    if set(adapted) != wanted:
        problems.append(("train.lora.targets", _other_targets(wanted, set(adapted))))
    violations = [FieldViolation(field=field, description=f"{field} {what}") for field, what in problems]
    if violations:
        more = "".join(f"; {violation.description}" for violation in violations[1:])
        raise InvalidSpec(f"init_from: {violations[0].description}{more}", violations=violations)


def _differences(found: AdapterFolder, train: TrainSpec) -> list[tuple[str, str]]:
    config, lora = found.config, train.lora
    pairs = (
        ("rank", lora.rank, config.rank),
        ("alpha", lora.alpha, config.alpha),
        ("rslora", lora.rslora, config.rslora),
        ("dora", lora.dora, config.dora),
    )
    return [
        (f"train.lora.{name}", f"is {_shown(asked)}, and the adapter has {_shown(has)}; write {name}: {_shown(has)}")
        for name, asked, has in pairs
        if asked != has
    ]


def _shown(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def _other_targets(wanted: set[str], adapted: set[str]) -> str:
    modules = sorted({name.split(".")[-2] for name in adapted})
    missing, extra = sorted(wanted - adapted), sorted(adapted - wanted)
    parts = [
        f"{what} {', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}"
        for what, names in (("the adapter lacks", missing), ("the adapter also has", extra))
        if names
    ]
    # Expressions that mean exactly these, wherever the same modules of all layers are adapted.
    write = f"targets: [{', '.join(modules)}]"
    return f"differ: {' and '.join(parts)}; write {write}, or expressions that fit the adapter's weights alone"
