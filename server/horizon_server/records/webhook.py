"""Webhooks: addresses that are notified of changes of jobs' states, and deliveries to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from horizon_server.records.account import Principal
from horizon_server.records.times import UnixTime

PENDING, DELIVERED, FAILED, DROPPED = "pending", "delivered", "failed", "dropped"
"""Outcomes of a delivery: it is to be sent, was answered, was given up, or will never be sent."""
TEST = "test"
"""In place of a job's state, in a delivery that only tries the address."""


@dataclass(frozen=True, kw_only=True)
class Webhook:
    """An address that is notified of changes of the jobs of a project or, without one, of its owner."""

    webhook_id: str
    owner: str
    project: str
    url: str
    events: tuple[str, ...]
    """The states that it is notified of, in lower case."""
    format: str
    """json or slack."""
    created_s: UnixTime
    disabled_s: UnixTime | None = None
    disable_reason: str = ""
    last_attempt_s: UnixTime | None = None
    last_result: str = ""


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """One change of a job's state on its way to one webhook. Every attempt sends the same id."""

    delivery_id: str
    event: str
    """Type of the event: job.succeeded, or webhook.test."""
    job_id: str
    outcome: str
    created_s: UnixTime
    num_attempts: int = 0
    status_code: int = 0
    error: str = ""
    last_attempt_s: UnixTime | None = None
    next_attempt_s: UnixTime | None = None


@dataclass(frozen=True, kw_only=True)
class DueDelivery:
    """A delivery with all that sending it needs."""

    delivery: Delivery
    webhook: Webhook
    secret: str = field(repr=False)
    facts: dict[str, str | int]
    """What is said of the job, by name."""
    listener: Principal | None
    """The webhook's owner as they are now, with their role in its project; None where their account is disabled."""
