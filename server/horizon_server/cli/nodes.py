"""`horizond node`: the nodes of a fleet, which compute jobs with `nodes` together."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import click

from horizon_server.cli.options import Commands, print_rows, with_output_option, with_settings_options
from horizon_server.errors import BadSetting
from horizon_server.nodes.agent import NodeAgent
from horizon_server.nodes.directory import NodeDirectory
from horizon_server.nodes.key import make_key
from horizon_server.nodes.protocol import NodeReport
from horizon_server.planning.machine import find_accelerators, host_memory, usable_accelerators
from horizon_server.settings import child_environment, load_settings, quiet_libraries
from horizon_server.store.cpus import available_cpus
from horizon_server.telemetry.logs import configure_logging
from horizon_server.texts import size_text


@click.group(cls=Commands, name="node")
def node_group() -> None:
    """Use several machines for one job (docs/nodes.md), and make the key of a fleet (docs/fleet.md)."""


@node_group.command(epilog="\b\nExample:\n  horizond node key /etc/horizond/fleet.pem")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@with_settings_options
def key(file: Path | None, config: Path | None, state_dir: Path | None) -> int:
    """Make the key of a fleet, in FILE or where fleet_key_file says.

    Copy the file to each of the fleet's machines: who has it may do all that a node may, and act as any user of a
    daemon with box_port.
    """
    file = file or load_settings(config, state_dir=state_dir).fleet_key_file
    if file is None:
        raise BadSetting("say where the key is to be: horizond node key FILE, or set fleet_key_file")
    make_key(file)
    click.echo(f"{file} is made. Copy it to every machine of the fleet, readable by the daemon's user only.")
    return 0


@node_group.command("serve")
@with_settings_options
def serve_node(config: Path | None, state_dir: Path | None) -> int:
    """Give this machine's memory and devices to jobs of another node's daemon.

    It needs fleet_address and fleet_key_file, and keeps no model and no data. It works for one job at a time. Run no
    daemon beside it, which would not know what it takes. SIGTERM and Ctrl-C end it: its job is queued again then, and
    continues from the newest checkpoint. Exit code 0.
    """
    settings = load_settings(config, state_dir=state_dir)
    for name in ("fleet_address", "fleet_key_file"):
        if getattr(settings, name) is None:
            raise BadSetting(f"setting {name}: a node that serves others needs it (docs/nodes.md)")
    quiet_libraries()
    configure_logging(settings.log_level, settings.log_json)

    async def gpus() -> Any:
        return await usable_accelerators(await find_accelerators(), child_environment(), wanted=settings.gpu)

    agent = NodeAgent(
        settings,
        folder=settings.state_dir / "node",
        memory=host_memory,
        num_threads=settings.num_threads or available_cpus(),
        gpus=asyncio.run(gpus()),
        environment=child_environment(),
    )
    # In a thread, as the main one is where a signal is heard.
    serving = threading.Thread(target=agent.serve, name="serve")
    serving.start()
    click.echo(f"serves jobs of other nodes at {agent.address}")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    agent.close()
    serving.join()
    return 0


@node_group.command("list")
@with_settings_options
@with_output_option
def list_nodes(config: Path | None, state_dir: Path | None, output: str) -> None:
    """List the further nodes that this machine's daemon may use, and what each is doing."""
    settings = load_settings(config, state_dir=state_dir)
    directory = NodeDirectory(addresses=settings.nodes, key_file=settings.fleet_key_file)
    asyncio.run(directory.ask_all())
    print_rows([_row(address, directory.known[address]) for address in directory.addresses], output, name_key="node")


def _row(address: str, report: NodeReport | Exception) -> dict[str, str]:
    if not isinstance(report, NodeReport):
        return {"node": address, "host": "-", "state": str(report), "devices": "-", "free memory": "-"}
    gpus = [f"{report.gpus.count(name)} x {name}" for name in dict.fromkeys(report.gpus)]
    return {
        "node": address,
        "host": report.hostname,
        "state": f"job {report.job_id}" if report.job_id else "free",
        "devices": ", ".join(gpus) or f"{report.host_devices} of the processors",
        "free memory": f"{size_text(report.free_bytes)} of {size_text(report.host_bytes)}",
    }
