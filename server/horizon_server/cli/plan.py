"""`horizond plan`: a job's memory ledger and its predicted speed, without a daemon."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import click
import yaml

from horizon_formats.model_files import CONFIG_FILE, is_hub_id
from horizon_server.cli.options import print_mapping, with_settings_options
from horizon_server.errors import InvalidSpec, NotFound
from horizon_server.planning.drives import find_drives
from horizon_server.planning.machine import Machine, RateBook, find_accelerators, usable_accelerators
from horizon_server.planning.outline import config_outline, has_weights
from horizon_server.planning.planner import Planner
from horizon_server.records.plan import Plan
from horizon_server.settings import child_environment, load_settings
from horizon_server.spec import JobSpec, parse_job_spec
from horizon_server.store.cpus import available_cpus
from horizon_server.texts import size_text

_SHOWN = (
    *(
        "num_parameters",
        "device",
        "num_devices",
        "num_nodes",
        "lanes",
        "parallel",
        "compute_dtype",
        "host_bytes",
        "host_total_bytes",
        "host_limit_bytes",
    ),
    *("device_bytes", "device_total_bytes", "device_limit_bytes", "fits", "message", "warnings", "hint", "num_steps"),
)


@click.command()
@click.argument("spec_file", metavar="SPEC.yaml", type=click.Path(path_type=Path))
@click.option("--model-dir", type=click.Path(path_type=Path), help="Model folder, where the spec names a pushed model.")
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", show_default=True)
@with_settings_options
def plan(spec_file: Path, model_dir: Path | None, output: str, config: Path | None, state_dir: Path | None) -> int:
    """Show how much memory a job needs and whether it fits.

    Also how fast it is expected to be on this machine. The model is a folder, of which config.json alone is enough, or
    the id of a model of the Hugging Face hub (Qwen/Qwen3-8B), of which only config.json and the headers of the weights
    are read.

    The prediction needs the machine's speed, which 'horizond doctor' or a running daemon has measured. Exit code 1 when
    it does not fit.
    """
    settings = load_settings(config, state_dir=state_dir)
    spec, model = _spec_and_model(spec_file, model_dir)
    accelerators = asyncio.run(
        usable_accelerators(asyncio.run(find_accelerators()), child_environment(), wanted=settings.gpu)
    )
    machine = Machine.of(accelerators, num_threads=settings.num_threads or available_cpus())
    book = RateBook(settings.state_dir, machine)
    planner = Planner.of_node(settings, book, accelerators, drives=find_drives(settings))
    job_plan = asyncio.run(_planned(planner, spec, model))
    mapping: dict[str, Any] = {"model": str(model)} | {name: getattr(job_plan, name) for name in _SHOWN}
    mapping["kept"] = None if job_plan.kept is None else dataclasses.asdict(job_plan.kept)
    mapping["drives"] = None if job_plan.drives is None else dataclasses.asdict(job_plan.drives)
    mapping["device_range"] = None if job_plan.device_range is None else dataclasses.asdict(job_plan.device_range)
    mapping["node_range"] = None if job_plan.node_range is None else dataclasses.asdict(job_plan.node_range)
    mapping["prediction"] = None if job_plan.prediction is None else dataclasses.asdict(job_plan.prediction)
    mapping["ways"] = None if job_plan.ways is None else dataclasses.asdict(job_plan.ways)
    mapping["references"] = None if job_plan.references is None else dataclasses.asdict(job_plan.references)
    if job_plan.prediction is None:
        click.echo("no prediction of the speed: run 'horizond doctor' once to measure this machine", err=True)
    if output == "table":
        # On the host the device's memory is part of the host's, so a second column would count it twice.
        on_host = job_plan.is_on_host
        if job_plan.kept is not None:
            mapping["kept"] = job_plan.kept.text
        if job_plan.drives is not None:
            mapping["drives"] = job_plan.drives.text
        mapping = _readable({k: v for k, v in mapping.items() if not (on_host and k.startswith("device_"))})
    print_mapping(mapping, output)
    return 0 if job_plan.fits else 1


def _spec_and_model(spec_file: Path, model_dir: Path | None) -> tuple[JobSpec, Path | str]:
    """Return the job's spec, and the model's folder or its id on the hub; like the client, accept local paths in place
    of names.

    Raises:
        NotFound: the spec names a pushed model, or a folder without a config.json.
    """
    written = _read_spec(spec_file)
    if not isinstance(written, dict):
        return parse_job_spec(written), Path()  # refused
    named = written.get("model")
    folder = model_dir or next((f for f in (spec_file.parent / str(named), Path(str(named))) if f.is_dir()), None)
    # The memory does not depend on the data, and of the model only the folder counts.
    names: dict[str, Any] = {key: "local" for key in ("dataset", "eval_dataset") if _is_text(written.get(key))}
    evaluation = written.get("eval")
    if isinstance(evaluation, dict) and isinstance(evaluation.get("sets"), dict):
        names["eval"] = {**evaluation, "sets": dict.fromkeys(evaluation["sets"], "local")}
    if _is_text(named) and (folder is not None or "/" in str(named)):
        names["model"] = "local"
    # The columns of local data are the client's own.
    spec = parse_job_spec({**{key: value for key, value in written.items() if key != "map"}, **names})
    if folder is None and is_hub_id(str(named)):
        return spec, str(named)
    folder = folder or Path(str(named))
    if not (folder / CONFIG_FILE).is_file():
        raise NotFound(f"{folder} contains no {CONFIG_FILE}; name the model's folder with --model-dir")
    return spec, folder


async def _planned(planner: Planner, spec: JobSpec, model: Path | str) -> Plan:
    """Plan with what is known of the model: its weights' headers, here or on the hub, or its config.json alone."""
    if isinstance(model, str):
        # Only here: the other plans need no hub.
        from horizon_server.hub import find_model, write_model_outline

        with tempfile.TemporaryDirectory(prefix="horizond-plan-") as name:
            folder = await asyncio.to_thread(lambda: write_model_outline(find_model(model, None), Path(name)))
            return await asyncio.to_thread(planner.plan, spec, folder)
    if not has_weights(model):
        async with config_outline((model / CONFIG_FILE).read_bytes(), environment=child_environment()) as folder:
            return await asyncio.to_thread(planner.plan, spec, folder)
    return await asyncio.to_thread(planner.plan, spec, model)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


class _SpecLoader(yaml.SafeLoader):
    """YAML whose numbers are JSON's too."""


# YAML 1.1 reads 1e-5 as text, as its floats need a point; in a job spec it is a learning rate.
_SpecLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)[eE][+-]?\d+"), list("+-.0123456789")
)


def _read_spec(path: Path) -> Any:
    try:
        text = path.read_text("utf-8")
        return json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=_SpecLoader)  # noqa: S506
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InvalidSpec(f"{path}{line}: not YAML: {error.problem}") from error
    except FileNotFoundError as error:
        raise NotFound(f"{path} does not exist") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InvalidSpec(f"{path} cannot be read as a job spec: {str(error).splitlines()[0]}") from error


def _readable(mapping: dict[str, Any]) -> dict[str, Any]:
    lines: dict[str, Any] = {}
    for key, value in mapping.items():
        match value:
            case None | "":
                pass
            case tuple():
                lines |= {f"warning {i}" if len(value) > 1 else "warning": text for i, text in enumerate(value, 1)}
            case dict() if key == "prediction":
                lines["predicted.speed"] = f"{value['tokens_per_second']:,.0f} tokens/s"
                lines["predicted.step"] = f"{value['step_s']:,.3g} s"
                lines["predicted.bound"] = value["bound"]
                # Unknown until the data is prepared, where the spec counts epochs.
                if value["total_s"] is not None:
                    lines["predicted.total"] = f"{value['total_s'] / 60:,.1f} min"
            case dict() if key == "references":
                # The data is not known here.
                lines["references.speed"] = f"{value['tokens_per_second']:,.0f} tokens/s, over all data before step 1"
            case dict() if key == "ways":
                seconds = {name.removesuffix("_s"): step_s for name, step_s in value.items() if step_s is not None}
                lines |= {f"predicted.by_{way}": f"{step_s:,.3g} s" for way, step_s in seconds.items()}
            case dict() if key.endswith("_range"):
                kept = f"{size_text(value['host_bytes'])} of host memory are kept for any number of them"
                lines[key] = f"{value['least']} to {value['most']}, {kept}"
            case dict():
                lines |= {f"{key.removesuffix('_bytes')}.{part}": size_text(size) for part, size in value.items()}
            case int() if key.endswith("_bytes"):
                lines[key.removesuffix("_bytes")] = size_text(value)
            case bool() | str():
                lines[key] = value
            case _:
                lines[key] = f"{value:,}"
    return lines
