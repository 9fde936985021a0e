"""The worker's entry with another `LOST_S`: a node that says nothing for 60 s is lost, not for 6 s.

On a busy machine a sound node may get no processor for some seconds, and the cause of a rank's end may take as long to
arrive. Who is lost, and of what, is the same.
"""

from __future__ import annotations

import importlib

from horizon_server.nodes import protocol
from horizon_server.worker_link.worker_end import serve_worker

if __name__ == "__main__":
    # Before other modules take it.
    protocol.LOST_S = 60.0
    worker = importlib.import_module("horizon_server.worker.__main__")
    serve_worker(worker.work, who="the worker", load=worker.load)
