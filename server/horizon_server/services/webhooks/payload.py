"""What a webhook is told, and the signature by which its receiver knows that this daemon has sent it.

Source: the Standard Webhooks specification, https://github.com/standard-webhooks/standard-webhooks.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from horizon_server.errors import InvalidSpec

FORMATS = ("json", "slack")
SECRET_PREFIX = "whsec_"  # noqa: S105  # the beginning of every secret
_MADE_BYTES = 32
_KEY_BYTES = range(24, 65)


def new_secret() -> str:
    """Return a new secret."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(_MADE_BYTES)).decode()


def check_secret(secret: str) -> None:
    """Let pass a secret that a user has brought. Raises InvalidSpec."""
    try:
        key = _key(secret)
    except ValueError:
        key = b""
    if len(key) not in _KEY_BYTES or not secret.startswith(SECRET_PREFIX):
        raise InvalidSpec.of(
            "secret",
            "secret must be whsec_ and 24 to 64 random bytes in base64; make one with: "
            "printf 'whsec_%s\\n' \"$(openssl rand -base64 32)\"",
        )


def body_of(kind: str, facts: Mapping[str, str | int], *, event: str, created_s: float, public_url: str | None) -> str:
    """Return the body of a request in the format `kind`.

    Args:
        facts: what is known of the job, or of a test.
        event: type of the event, such as job.succeeded.
    """
    data: dict[str, Any] = {**facts}
    if "job_id" in facts:
        data["state"] = event.removeprefix("job.").upper()
        if public_url is not None:
            data["url"] = f"{public_url.rstrip('/')}/jobs/{facts['job_id']}"
    if kind == "slack":
        return json.dumps({"text": _sentence(data)})
    moment = datetime.fromtimestamp(created_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"type": event, "timestamp": moment, "data": data})


def headers_of(delivery_id: str, body: str, secret: str, now_s: float) -> dict[str, str]:
    """Return the headers that tell the receiver which delivery this is, and that it is ours."""
    timestamp = str(int(now_s))
    mac = hmac.new(_key(secret), f"{delivery_id}.{timestamp}.{body}".encode(), hashlib.sha256)
    return {
        "webhook-id": delivery_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": f"v1,{base64.b64encode(mac.digest()).decode()}",
    }


def _sentence(data: Mapping[str, Any]) -> str:
    """One line of a chat, in Slack's markup."""
    if "job_id" not in data:
        return f"horizon: {_plain(data['message'])}"
    name = _plain(data["name"])
    job = f"<{data['url']}|{name}>" if "url" in data else name
    whose = f"{_plain(data['owner'])}, project {_plain(data['project'])}"
    done = f", step {data['step']:,} of {data['num_steps']:,}" if data["num_steps"] else ""
    why = f": {_plain(data['message'])}" if data["message"] else ""
    return f"Job *{job}* ({whose}) is {data['state']}{done}{why}"


def _plain(text: str) -> str:
    """Escape what Slack reads as markup of links and mentions: a job's message must not notify a whole channel."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _key(secret: str) -> bytes:
    try:
        return base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
