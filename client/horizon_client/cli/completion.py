"""`horizon completion`."""

from __future__ import annotations

import click

_SHELLS = ["bash", "zsh", "fish"]


@click.command(
    epilog="""\b
Example:
  horizon completion bash > ~/.horizon-completion.bash
  echo '. ~/.horizon-completion.bash' >> ~/.bashrc
  horizon completion fish > ~/.config/fish/completions/horizon.fish"""
)
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of your shell."""
    from click.shell_completion import get_completion_class

    from horizon_client.cli.root import horizon

    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - click knows all of _SHELLS
    click.echo(kind(horizon, {}, "horizon", "_HORIZON_COMPLETE").source())
