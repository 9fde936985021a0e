"""`horizond demo`: see `horizon_server.demo`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    default=Path("demo-output"),
    show_default=True,
    help="Folder of the tuned model. Replaced each time.",
)
@click.option("--max-steps", type=click.IntRange(min=2), help="Train this many steps instead of the recipe's.")
@click.option("--config", type=click.Path(path_type=Path), help="The throw-away daemon's TOML file.")
@click.option(
    "--state-dir", type=click.Path(path_type=Path), help="Keep the daemon's state here instead of throwing it away."
)
def demo(output_dir: Path, max_steps: int | None, config: Path | None, state_dir: Path | None) -> int:
    """Run a whole fine-tuning job on this machine.

    Daemon, login, upload, training, download and proof, in minutes on two cores.
    Needs no GPU and no network. Exit code 0 only when the loss fell and plain transformers gives the same loss.
    """
    from horizon_server.demo.run import run_demo

    return run_demo(output_dir=output_dir, max_steps=max_steps, config=config, state_dir=state_dir)
