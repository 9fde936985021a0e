"""`horizon node` and `horizon version`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

import click

from horizon_client.cli.output import (
    View,
    about_text,
    bytes_text,
    clean,
    details,
    duration_text,
    output_option,
    print_one,
    print_result,
    table,
    time_text,
)
from horizon_client.cli.root import Commands, connection_options
from horizon_client.cli.session import connected, open_client
from horizon_client.cli.times import duration, length_text, moment
from horizon_client.errors import BadConfig
from horizon_client.profiles import NO_SERVER
from horizon_client.version import client_version

if TYPE_CHECKING:
    from horizon_client.resources import Box, DeviceStatus, FurtherNode, Node, NodeCondition
    from horizon_client.sync_client import Client


# States of jobs that a machine is busy with, or will be.
_ALIVE = ("QUEUED", "PREPARING", "STARTING", "RUNNING", "STOPPING")


def _facts(node: Node) -> list[tuple[str, str]]:
    jobs = ", ".join(f"{number} {state}" for state, number in sorted(node.num_jobs.items()) if number)
    devices = [(f"device {a.index}", f"{a.name}, {bytes_text(a.memory_bytes)}") for a in node.accelerators]
    uses = ", ".join(f"{use.user} in {use.project} {duration_text(use.device_s)}" for use in node.share_uses)
    slices = f"{node.time_slice_s:g} s each; use counts half after {duration_text(node.share_half_life_s)}"
    window = _maintenance_text(node.condition)
    free, limit = bytes_text(node.host_memory_available_bytes), bytes_text(node.host_memory_limit_bytes)
    return [
        ("host", node.hostname),
        ("version", node.version),
        ("state", _state_text(node)),
        *([("maintenance", window)] if window else []),
        (
            "memory",
            f"{free} free of {limit}; {bytes_text(node.host_memory_promised_bytes)} promised to resident jobs and "
            "answers",
        ),
        ("CPUs", str(node.num_cpus)),
        *(devices or [("device", "none; jobs run on the CPUs")]),
        ("disk", f"{bytes_text(node.disk_free_bytes)} free"),
        ("jobs", jobs or "none"),
        ("turns", slices),
        *((f"turn on {device.name}", _turn_text(device)) for device in node.devices),
        *((f"machine {box.name}", _box_text(box)) for box in node.boxes),
        *((f"node {further.address}", _further_text(further)) for further in node.further_nodes),
        *([("use", uses)] if uses else []),
        ("you", f"{node.user}, role {node.role}"),
    ]


def _state_text(node: Node) -> str:
    """Return whether jobs start, and the admin's message where it belongs to that; of a window ahead, the window has
    it."""
    modes = {"cordoned": "cordoned: no job starts", "drained": "drained: jobs are unloaded and wait"}
    state = "the daemon is shutting down" if node.draining else modes.get(node.mode, "open")
    message = node.condition.message if node.condition else ""
    is_open = node.mode == "open" and not node.draining
    return f"{state} ({clean(message)})" if message and not is_open else state


def _maintenance_text(condition: NodeCondition | None) -> str:
    if condition is None or condition.window_start_time is None:
        return ""
    message = f" ({clean(condition.message)})" if condition.message else ""
    return f"{time_text(condition.window_start_time)} to {time_text(condition.window_end_time)}{message}"


def _turn_text(device: DeviceStatus) -> str:
    number = f"{device.num_residents} resident job{'' if device.num_residents == 1 else 's'}"
    out = f"; {_out_text(device)}" if device.out_of_service else ""
    return f"{device.holder or 'nobody'} ({number}){out}"


def _box_text(box: Box) -> str:
    if box.state == "lost":
        return f"lost: {clean(box.message)}"
    jobs = f"{box.num_jobs} job{'' if box.num_jobs == 1 else 's'}"
    return f"{box.state}, {jobs}, {_memory_text(box)} free, {_gpus_text(box.gpus)}"


def _further_text(further: FurtherNode) -> str:
    if further.state == "lost":
        return f"lost: {clean(further.message)}"
    return f"{further.state}, {_memory_text(further)} free, {_gpus_text(further.gpus)}"


def _memory_text(machine: FurtherNode | Box | Node) -> str:
    return f"{bytes_text(machine.host_memory_available_bytes)} of {bytes_text(machine.host_memory_limit_bytes)}"


def _gpus_text(names: Sequence[str]) -> str:
    """Return how many there are of each model: 8 x H100."""
    models = [f"{names.count(name)} x {clean(name)}" for name in dict.fromkeys(names)]
    return ", ".join(models) or "processors"


def _out_text(device: DeviceStatus) -> str:
    return f"is out of service: {clean(device.out_of_service)}"


NODE_VIEW: View[Node] = View(columns=[], details=_facts, name=lambda n: n.hostname)


@click.group(cls=Commands)
def node() -> None:
    """Show the machine that the daemon runs on, drain it for maintenance, and take single devices out of service."""


@node.command(epilog="\b\nExample:\n  horizon node status -o json")
@output_option
@connected
def status(client: Client, output: str) -> None:
    """Show the node's status, and your user and role.

    Memory, devices, disk and jobs of the node, whether jobs start, and whose turn it is on each device.
    """
    print_one(client.node.status(), NODE_VIEW, output)


@node.command("list", epilog="\b\nExample:\n  horizon node list")
@output_option
@connected
def list_nodes(client: Client, output: str) -> None:
    """List the node, the machines that jobs are sent to, and the further nodes that jobs with nodes use.

    A job's 'node: NAME' names one of the first two kinds.
    """
    found = client.node.status()
    num_idle = sum(not device.num_residents and not device.out_of_service for device in found.devices)
    gpus = f"{_gpus_text([accelerator.name for accelerator in found.accelerators])}, {num_idle} idle"
    num_jobs = sum(found.num_jobs.get(state, 0) for state in _ALIVE)
    free = "now" if num_idle else "-"
    rows = [
        [f"{clean(found.box_name)}*", _state_text(found), gpus, _memory_text(found), str(num_jobs), free],
        *(_box_row(box) for box in found.boxes),
        *(_further_row(one) for one in found.further_nodes),
    ]
    titles = ["NODE", "STATE", "GPUS", "FREE MEMORY", "JOBS", "NEXT FREE"]
    keys = [title.lower().replace(" ", "_") for title in titles]
    print_result(
        [dict(zip(keys, row, strict=True)) for row in rows],
        output,
        names=[row[0] for row in rows],
        page=lambda: table(titles, rows),
    )


def _box_row(box: Box) -> list[str]:
    if box.state == "lost":
        return [box.name, f"lost: {clean(box.message)}", "-", "-", "-", "-"]
    state = f"{box.state}{f': {clean(box.message)}' if box.message else ''}"
    free = "now" if box.num_idle else about_text(box.next_free_time)
    gpus = f"{_gpus_text(box.gpus)}, {box.num_idle} idle"
    return [box.name, state, gpus, _memory_text(box), str(box.num_jobs), free]


def _further_row(one: FurtherNode) -> list[str]:
    if one.state == "lost":
        return [one.address, f"lost: {clean(one.message)}", "-", "-", "-", "-"]
    return [one.address, f"{one.state} (for jobs with nodes)", _gpus_text(one.gpus), _memory_text(one), "-", "-"]


_MESSAGE = click.option("--message", default="", metavar="TEXT", help="Shown to everybody whose jobs wait.")


@node.command(epilog='\b\nExample:\n  horizon node cordon --message "update of the driver at 18:00"')
@_MESSAGE
@output_option
@connected
def cordon(client: Client, message: str, output: str) -> None:
    """Start no more jobs; resident jobs continue. For admins."""
    _print_set(client.node.set_mode("cordoned", message=message), output)


@node.command(epilog='\b\nExample:\n  horizon node drain --message "the machine is being moved"')
@_MESSAGE
@output_option
@connected
def drain(client: Client, message: str, output: str) -> None:
    """Start no more jobs; resident jobs are checkpointed and queued again. For admins.

    They continue from their checkpoints after 'horizon node uncordon'.
    """
    _print_set(client.node.set_mode("drained", message=message), output)


@node.command(epilog="\b\nExample:\n  horizon node uncordon")
@output_option
@connected
def uncordon(client: Client, output: str) -> None:
    """Let jobs start again, after cordon or drain. For admins."""
    _print_set(client.node.set_mode("open"), output)


@node.command(
    epilog="""\b
Example:
  horizon node maintenance --from 2026-11-23T18:00 --for 2h
  horizon node maintenance --cancel"""
)
@click.option("--from", "start", type=moment, metavar="TIME", help="Begin, such as 2026-11-23T18:00 in local time.")
@click.option("--for", "length", type=duration, metavar="DURATION", help="How long, such as 90m or 2h.")
@click.option("--cancel", is_flag=True, help="Remove the maintenance window.")
@_MESSAGE
@output_option
@connected
def maintenance(
    client: Client, start: datetime | None, length: timedelta | None, cancel: bool, message: str, output: str
) -> None:
    """Drain the node in a window of time, and open it again after that. For admins.

    Jobs that would not end before the window may still start: they are checkpointed at its begin and continue after it.
    """
    if cancel and start is None and length is None:
        _print_set(client.node.cancel_maintenance(), output)
    elif not cancel and start is not None and length is not None:
        if start + length <= datetime.now(timezone.utc):
            raise click.UsageError(
                f"--from {start:%Y-%m-%dT%H:%M} --for {length_text(length)} has ended already "
                f"({start + length:%H:%M}); give a window that "
                "ends in the future"
            )
        _print_set(client.node.set_maintenance(start, start + length, message=message), output)
    else:
        raise click.UsageError("give --from and --for, or only --cancel")


_DEVICE = click.argument("device", metavar="DEVICE")


@node.command(epilog="\b\nExample:\n  horizon node withdraw cuda:1")
@_DEVICE
@output_option
@connected
def withdraw(client: Client, device: str, output: str) -> None:
    """Take a device out of service: no job uses it any more. For admins.

    A job that has other devices, or may have them, continues there after its present step, in the same memory. Others
    are checkpointed and wait.
    """
    _print_set(client.node.withdraw(device), output)


@node.command(epilog="\b\nExample:\n  horizon node restore cuda:1")
@_DEVICE
@output_option
@connected
def restore(client: Client, device: str, output: str) -> None:
    """Put a device into service again, after withdraw or a failure. For admins."""
    _print_set(client.node.restore(device), output)


def _print_set(changed: Node, output: str) -> None:
    window = _maintenance_text(changed.condition)
    message = f"{clean(changed.hostname)}: {_state_text(changed)}{f'; maintenance from {window}' if window else ''}"
    message += "".join(f"; {device.name} {_out_text(device)}" for device in changed.devices if device.out_of_service)
    print_one(changed, NODE_VIEW, output, message=message)


@click.command(epilog="\b\nExample:\n  horizon version")
@output_option
@connection_options
def version(output: str, **options: str | None) -> None:
    """Print the versions of client and server; before the first login only the client's."""
    versions = {"client": client_version(), "server": None}
    try:
        client = open_client(click.get_current_context())
    except BadConfig as error:
        if error.reason != NO_SERVER:  # a broken configuration is not the same as none
            raise
    else:
        with client:
            versions["server"] = client.node.status().version
    facts = [(name, text or "not configured") for name, text in versions.items()]
    print_result(versions, output, names=[str(versions["client"])], page=lambda: details(facts))
