"""`horizon node` and `horizon version`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from horizon_client.cli.output import View, bytes_text, details, output_option, print_one, print_result
from horizon_client.cli.root import Commands, connection_options
from horizon_client.cli.session import connected, open_client
from horizon_client.errors import BadConfig
from horizon_client.profiles import NO_SERVER

if TYPE_CHECKING:
    from horizon_client.resources import Node
    from horizon_client.sync_client import Client


def _facts(node: Node) -> list[tuple[str, str]]:
    jobs = ", ".join(f"{number} {state}" for state, number in sorted(node.num_jobs.items()) if number)
    devices = [(f"device {a.index}", f"{a.name}, {bytes_text(a.memory_bytes)}") for a in node.accelerators]
    free, limit = bytes_text(node.host_memory_available_bytes), bytes_text(node.host_memory_limit_bytes)
    return [
        ("host", node.hostname),
        ("version", node.version),
        ("state", "draining" if node.draining else "serving"),
        ("memory", f"{free} free of {limit}"),
        ("CPUs", str(node.num_cpus)),
        *(devices or [("device", "none; jobs run on the CPUs")]),
        ("disk", f"{bytes_text(node.disk_free_bytes)} free"),
        ("jobs", jobs or "none"),
        ("you", f"{node.user}, role {node.role}"),
    ]


_VIEW: View[Node] = View(columns=[], details=_facts, name=lambda n: n.hostname)


@click.group(cls=Commands)
def node() -> None:
    """Show the machine that the daemon runs on."""


@node.command(epilog="\b\nExample:\n  horizon node status -o json")
@output_option
@connected
def status(client: Client, output: str) -> None:
    """Show the node's status, and your user and role.

    Memory, devices, disk and jobs of the node.
    """
    print_one(client.node.status(), _VIEW, output)


@click.command(epilog="\b\nExample:\n  horizon version")
@output_option
@connection_options
def version(output: str, **options: str | None) -> None:
    """Print the versions of client and server; before the first login only the client's."""
    from importlib.metadata import version as distribution_version

    versions = {"client": distribution_version("horizon-train"), "server": None}
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
