"""Orders to a worker to end at its next step boundary."""

from __future__ import annotations

from horizon_server.records.job import StopRequest
from horizon_server.worker_link.orders import stop_order

MOVE = stop_order(StopRequest.MOVE)
"""Without a checkpoint: the next worker continues in the same memory."""
CANCEL = stop_order(StopRequest.CANCEL)
STOP = stop_order(StopRequest.DRAIN)
"""With a checkpoint."""
