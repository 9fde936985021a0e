"""A reporter that keeps what it receives, and does what a test wants at that moment."""

from __future__ import annotations

from collections.abc import Callable

from horizon_client import Progress, Reporter


class Recorder(Reporter):
    """Keeps every progress and notice, and passes them on."""

    def __init__(
        self,
        on_progress: Callable[[Progress], object] = lambda progress: None,
        on_notice: Callable[[str], object] = lambda message: None,
    ) -> None:
        self.reports: list[Progress] = []
        self.notices: list[str] = []
        self._on_progress = on_progress
        self._on_notice = on_notice

    def progress(self, progress: Progress) -> None:
        self.reports.append(progress)
        self._on_progress(progress)

    def notice(self, message: str) -> None:
        self.notices.append(message)
        self._on_notice(message)
