"""`horizond serve`: the daemon itself."""

from __future__ import annotations

from pathlib import Path

import click

from horizon_server.cli.options import with_settings_options
from horizon_server.settings import load_settings


@click.command()
@click.option("--grpc", metavar="HOST:PORT", help="Address of the gRPC interface. [default: 127.0.0.1:7171]")
@click.option("--http", metavar="HOST:PORT", help="Address of REST, web page and /metrics. [default: 127.0.0.1:7172]")
@click.option(
    "--tls-name",
    "tls_names",
    multiple=True,
    metavar="NAME",
    help="Host name or address by which laptops call this machine, for the certificate (repeatable).",
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="[default: info]")
@click.option("--log-json", is_flag=True, default=None, help="One JSON object a line.")
@with_settings_options
def serve(
    grpc: str | None,
    http: str | None,
    tls_names: tuple[str, ...],
    log_level: str | None,
    log_json: bool | None,
    config: Path | None,
    state_dir: Path | None,
) -> int:
    """Run the daemon in the foreground.

    SIGTERM and Ctrl-C checkpoint the running job and end with exit code 0.

    Beyond loopback it speaks TLS only. On the first start it makes a certificate for this machine's name and every --tls-name, and prints
    the file that laptops need.
    """
    settings = load_settings(
        config,
        state_dir=state_dir,
        grpc=grpc,
        http=http,
        tls_names=tls_names or None,
        log_level=log_level,
        log_json=log_json,
    )
    from horizon_server.main import run_daemon

    return run_daemon(settings)
