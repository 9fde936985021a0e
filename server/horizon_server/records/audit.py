"""One line of the audit log."""

from __future__ import annotations

from dataclasses import dataclass

UNKNOWN = "UNKNOWN"
"""The outcome of a change that is being made, or that was cut."""


@dataclass(frozen=True, kw_only=True)
class AuditEntry:
    """One change, carried out or refused: who, when, from where, what, and how it ended. Times are Unix seconds."""

    number: int = 0
    """Given by the database, in the order of writing."""
    time_s: float
    user: str
    """A user of the daemon, or the system account that ran a command on the node."""
    token_id: str
    """The token that was presented; empty for commands on the node."""
    origin: str
    """The caller's address, or the account behind a command."""
    action: str
    """A method such as JobService.CancelJob, or a command such as horizond user add."""
    resource: str
    outcome: str
    """OK, or the reason of the error; UNKNOWN from before the change until it is known how it ended, so also where the
    daemon was killed in between."""
    detail: str
