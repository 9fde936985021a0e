"""Times on the wire."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp


def to_timestamp(time_s: float) -> Timestamp | None:
    """Return a Unix time for an answer; None, which leaves the field unset, while it is unknown (0)."""
    if not time_s:
        return None
    stamp = Timestamp()
    stamp.FromNanoseconds(round(time_s * 1e6) * 1000)
    return stamp
