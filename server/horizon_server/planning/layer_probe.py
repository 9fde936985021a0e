"""Counts what the layers of some models keep and take, in a child process that loads torch. Loads no torch itself.

Of recurrent models, and of those whose attention keeps its scores: no formula says what their classes make of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import threading
from collections.abc import Mapping

import structlog

from horizon_server.children.child import ChildTask, Limits
from horizon_server.codec import from_plain
from horizon_server.errors import HorizonError
from horizon_server.planning.ledger import LayerMemory
from horizon_server.planning.machine import host_memory
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.store.layout import StoreLayout
from horizon_server.store.model_files import CONFIG_FILE

log = structlog.get_logger(__name__)

PROBE_TIMEOUT_S = 120.0

_MAX_REMEMBERED = 256
_RECURRENT = ("A_log", "conv1d", "conv.conv", "rg_lru", "mlstm_layer", "slope_rate", "time_decay")
"""Parts of names that tensors of recurrent layers have: state spaces, linear attention, delta rules, gated
convolutions."""


def is_recurrent(layout: StoreLayout) -> bool:
    """Whether some layers keep a state from token to token, by the names of their tensors."""
    return any(part in tensor.name for _, tensor in layout.tensors() for part in _RECURRENT)


class LayerProbe:
    """Counts once per config what the layers of a recurrent model keep, or of one whose attention keeps its scores.

    Thread: any but an event loop's; one probe runs at a time.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._found: dict[str, LayerMemory | None] = {}
        self._lock = threading.Lock()

    def __call__(self, folder: ModelFolder) -> LayerMemory | None:
        """Return the count; None for models that the ledger's formulas cover, and where the child fails. Blocking."""
        scans = is_recurrent(folder.layout)
        if not scans and not folder.shape.num_score_planes:
            return None
        key = hashlib.sha256((folder.path / CONFIG_FILE).read_bytes()).hexdigest()
        with self._lock:
            if key not in self._found:
                # Pushed models come and go for as long as the daemon runs.
                if len(self._found) >= _MAX_REMEMBERED:
                    self._found.clear()
                self._found[key] = asyncio.run(self._count(folder, scans=scans))
            return self._found[key]

    async def _count(self, folder: ModelFolder, *, scans: bool) -> LayerMemory | None:
        # A model that takes more for one row of one layer is planned by formula: the count must not take memory from
        # running jobs.
        task = ChildTask(
            module="horizon_server.worker.measure",
            who="the count of a model's layers",
            environment=self._environment,
            limits=Limits(wall_s=PROBE_TIMEOUT_S, memory_bytes=host_memory().available_bytes // 2),
        )
        try:
            answer = await task.run({"layers_of": str(folder.path)})
            return dataclasses.replace(from_plain(LayerMemory, answer), scans=scans)
        except (HorizonError, OSError, ValueError) as error:
            # The worker meets the same failure, and reports it with its reason; the plan uses its formulas.
            log.warning(
                "the memory of a model's layers could not be counted", folder=folder.path.name, why=str(error)[:200]
            )
            return None
