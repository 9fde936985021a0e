"""What the parts that run jobs share: the daemon makes it once and hands it on whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from horizon_server.jobs.bases import Bases
from horizon_server.jobs.call_news import CallNews
from horizon_server.jobs.compiling import LayerCompiler
from horizon_server.jobs.folders import JobFolders
from horizon_server.jobs.journal import Journal, Lifecycle
from horizon_server.jobs.preparation import FindInputs
from horizon_server.jobs.queue_view import QueueView
from horizon_server.jobs.spare_worker import SpareWorker
from horizon_server.jobs.usage import UsageMeter
from horizon_server.nodes.directory import NodeDirectory
from horizon_server.planning.planner import Planner
from horizon_server.settings import Settings
from horizon_server.telemetry.metrics import Metrics


@dataclass(frozen=True, kw_only=True, eq=False)
class Runtime:
    """What scheduler and attempts work with. Thread: belongs to one event loop.

    Args:
        find_inputs: returns a job's model folder, its dataset and those of its evaluations.
        environment: variables of child processes.
        worker_module: what `python -m` runs as the worker of an attempt.
    """

    settings: Settings
    journal: Journal
    metrics: Metrics
    lifecycle: Lifecycle
    folders: JobFolders
    find_inputs: FindInputs
    planner: Planner
    meter: UsageMeter
    view: QueueView
    nodes: NodeDirectory
    calls: CallNews
    environment: Mapping[str, str]
    worker_module: str
    spare: SpareWorker
    compiler: LayerCompiler
    bases: Bases = field(default_factory=Bases)
