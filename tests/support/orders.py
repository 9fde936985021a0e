"""Orders to a worker to end at its next step boundary."""

from __future__ import annotations

from horizon_server.records.job import StopRequest
from horizon_server.worker_link.orders import stop_order

CANCEL = stop_order(StopRequest.CANCEL)
STOP = stop_order(StopRequest.DRAIN)
"""With a checkpoint."""
