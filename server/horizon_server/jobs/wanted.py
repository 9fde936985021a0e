"""What may be wanted of an attempt: the order that its worker is sent, and what the job says of it."""

from __future__ import annotations

from horizon_server.records.job import Wanted
from horizon_server.worker_link.orders import CANCEL, STOP

ORDERS = {
    Wanted.CANCEL: (CANCEL, "cancelled by a user"),
    Wanted.PAUSE: (STOP, "paused by a user"),
    Wanted.DRAIN: (STOP, "the daemon shuts down"),
    Wanted.DISPLACE: (STOP, "another job is to have its memory"),
    Wanted.UNLOAD: (STOP, "the node is drained by an admin"),
}
# Orders of users are stored, so that they are carried out even if the daemon dies; the daemon gives the others again if it must.
OF_USERS = (Wanted.CANCEL, Wanted.PAUSE)
