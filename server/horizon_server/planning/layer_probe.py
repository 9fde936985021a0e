"""Counts in a child process what a model's layers keep, where the ledger has no formula. Loads no torch: the child does."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Mapping

import structlog

from horizon_server.planning.ledger import LayerMemory
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.store.model_files import CONFIG_FILE

log = structlog.get_logger(__name__)

PROBE_TIMEOUT_S = 120.0
_MAX_REMEMBERED = 256

_RECURRENT = ("A_log", "conv1d", "conv.conv", "rg_lru", "mlstm_layer", "slope_rate", "time_decay")
"""Parts of names that tensors of recurrent layers have: state spaces, linear attention, delta rules, gated convolutions."""


class LayerProbe:
    """Answers once per config what the layers of a recurrent model keep. Thread: any; one probe runs at a time."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._found: dict[str, LayerMemory | None] = {}
        self._lock = threading.Lock()

    def __call__(self, folder: ModelFolder) -> LayerMemory | None:
        """Return the count; None for models that the ledger's formulas cover, and where the child fails. Blocking."""
        names = (tensor.name for _, tensor in folder.layout.tensors())
        if not any(part in name for name in names for part in _RECURRENT):
            return None
        key = hashlib.sha256((folder.path / CONFIG_FILE).read_bytes()).hexdigest()
        with self._lock:
            if key not in self._found:
                if len(self._found) >= _MAX_REMEMBERED:
                    self._found.clear()
                self._found[key] = self._count(folder)
            return self._found[key]

    def _count(self, folder: ModelFolder) -> LayerMemory | None:
        command = [sys.executable, "-m", "horizon_server.worker.layer_memory", str(folder.path)]
        try:
            done = subprocess.run(
                command,
                env=self._environment,
                capture_output=True,
                timeout=PROBE_TIMEOUT_S,
                check=True,
                stdin=subprocess.DEVNULL,
            )
            return LayerMemory(**json.loads(done.stdout))
        except (subprocess.SubprocessError, OSError, ValueError, TypeError) as error:
            # The worker meets the same failure, and reports it with its reason; the plan uses its formulas.
            log.warning(
                "the memory of a model's layers could not be counted", folder=folder.path.name, why=str(error)[:200]
            )
            return None
