"""The options of commands that watch a job: the trackers that follow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from horizon_client.cli.session import Notices
from horizon_formats.trackers.known import TRACKERS

if TYPE_CHECKING:
    from horizon_client.resources import Job, JobEvent


@dataclass(frozen=True, kw_only=True)
class Trackers:
    """What the options ask for."""

    names: tuple[str, ...]
    project: str
    folder: Path

    @contextmanager
    def following(self, job: Job) -> Iterator[Callable[[JobEvent], None]]:
        """Yield what takes the job's events; at the end everything is written. Without trackers it does nothing."""
        if not self.names:
            yield lambda event: None
            return
        from horizon_client.tracking import Followers  # only here: `horizon job --help` imports this module

        followers = Followers(job, self.names, project=self.project, folder=self.folder, notice=Notices().notice)
        try:
            yield followers.send
        finally:
            followers.close()


NO_TRACKERS = Trackers(names=(), project="", folder=Path())


def tracker_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command, which gets them as `trackers`."""

    @click.option(
        "--to",
        "names",
        multiple=True,
        type=click.Choice(list(TRACKERS)),
        help="Also write the job's figures to this tracker (repeatable).",
    )
    @click.option(
        "--tracker-project",
        default="",
        metavar="NAME",
        help="Project or experiment of the tracker. Default: the job's project.",
    )
    @click.option(
        "--tracker-dir",
        default=".",
        metavar="DIR",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder for what trackers write on this machine, such as TensorBoard's runs. Default: the current one.",
    )
    @functools.wraps(command)
    def run(*args: Any, names: tuple[str, ...], tracker_project: str, tracker_dir: Path, **values: Any) -> Any:
        trackers = Trackers(names=names, project=tracker_project, folder=tracker_dir.expanduser())
        return command(*args, trackers=trackers, **values)

    return run
