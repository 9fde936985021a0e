"""`horizon webhook`: addresses that are notified of changes of jobs, and their deliveries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from horizon_client.choices import JOB_STATES
from horizon_client.cli.output import View, age_text, clean, output_option, print_list, print_result, time_text
from horizon_client.cli.root import Commands
from horizon_client.cli.session import connected

if TYPE_CHECKING:
    from horizon_client.resources import Webhook, WebhookDelivery
    from horizon_client.sync_client import Client

_EVENTS = [state.lower() for state in JOB_STATES]
_VIEW: View[Webhook] = View(
    columns=[
        ("WEBHOOK ID", lambda w: w.webhook_id),
        ("JOBS OF", lambda w: f"project {w.project}" if w.project else w.owner),
        ("ON", lambda w: ",".join(w.events)),
        ("URL", lambda w: w.url),
        ("STATE", lambda w: "disabled" if w.disable_time else "enabled"),
        ("LAST SENT", lambda w: f"{age_text(w.last_attempt_time)} ago" if w.last_attempt_time else "never"),
        ("RESULT", lambda w: w.disable_reason or w.last_result or "-"),
    ],
    details=lambda w: [("id", w.webhook_id), ("url", w.url)],
    name=lambda w: w.webhook_id,
)
_DELIVERY_VIEW: View[WebhookDelivery] = View(
    columns=[
        ("DELIVERY ID", lambda d: d.delivery_id),
        ("EVENT", lambda d: d.event),
        ("JOB", lambda d: d.job_id or "-"),
        ("AGE", lambda d: age_text(d.create_time)),
        ("OUTCOME", lambda d: d.outcome),
        ("SENT", lambda d: str(d.num_attempts)),
        ("NEXT", lambda d: time_text(d.next_attempt_time)),
        ("ERROR", lambda d: d.error or "-"),
    ],
    details=lambda d: [("id", d.delivery_id), ("outcome", d.outcome), ("error", d.error)],
    name=lambda d: d.delivery_id,
)


def _events(_context: click.Context, _parameter: click.Parameter, text: str) -> list[str]:
    events = [part.strip() for part in text.split(",") if part.strip()]
    for event in events:
        if event not in _EVENTS:
            raise click.BadParameter(f"{event!r} is not a state of a job; choose from {', '.join(_EVENTS)}")
    return events


@click.group(cls=Commands)
def webhook() -> None:
    """Tell another program, or a chat, when the state of a job changes."""


@webhook.command(
    epilog="""\b
Example:
  horizon webhook add https://ci.lab.edu/horizon > webhook.secret
  horizon webhook add https://hooks.slack.com/services/... --format slack --on failed,succeeded
  horizon webhook add https://ci.lab.edu/horizon --project lab

\b
Requests are signed as standardwebhooks.com describes; the receiver needs the
secret to check that. docs/webhooks.md has an example."""
)
@click.argument("url")
@click.option(
    "--project", default="", metavar="PROJECT", help="All jobs of this project, for its admins. Default: your own jobs."
)
@click.option(
    "--on",
    "events",
    default="succeeded,failed,cancelled",
    show_default=True,
    callback=_events,
    metavar="STATE,...",
    help="States to notify of.",
)
@click.option(
    "--secret-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File with the key to sign with (whsec_ and base64). Without it the daemon makes one, which is printed once.",
)
@click.option(
    "--format",
    "body_format",
    type=click.Choice(["json", "slack"]),
    default="json",
    show_default=True,
    help="json for programs; slack for Slack, Mattermost and Rocket.Chat.",
)
@output_option
@connected
def add(
    client: Client, url: str, project: str, events: list[str], secret_file: Path | None, body_format: str, output: str
) -> None:
    """Have the daemon send a request to URL when the state of a job changes, and print the secret it signs with."""
    secret = "" if secret_file is None else secret_file.read_text("utf-8").strip()
    made = client.webhooks.add(url, project=project, events=events, format=body_format, secret=secret)
    hook = made.webhook
    whose = f"project {hook.project}" if hook.project else "your jobs"
    click.echo(f"webhook {hook.webhook_id} is notified when {whose} are {', '.join(hook.events)}", err=True)
    click.echo(f"try it: horizon webhook test {hook.webhook_id}", err=True)
    if not secret:
        click.echo("its requests are signed with this secret, which cannot be shown again:", err=True)
    # The secret alone on stdout, so that it can be redirected into a file
    print_result(
        {"webhook": hook, "secret": made.secret},
        output,
        names=[hook.webhook_id],
        page=lambda: clean(hook.webhook_id if secret else made.secret),
    )


@webhook.command(name="list", epilog="\b\nExample:\n  horizon webhook list")
@output_option
@connected
def list_webhooks(client: Client, output: str) -> None:
    """List your webhooks, and those of your projects."""
    print_list(client.webhooks.list(), _VIEW, output)


@webhook.command(epilog="\b\nExample:\n  horizon webhook remove wh_0123456789")
@click.argument("webhook_id")
@output_option
@connected
def remove(client: Client, webhook_id: str, output: str) -> None:
    """Remove a webhook: nothing more is sent to it."""
    client.webhooks.remove(webhook_id)
    gone = {"webhook_id": webhook_id}
    print_result(gone, output, names=[webhook_id], page=lambda: f"webhook {clean(webhook_id)} is removed")


@webhook.command(
    epilog="""\b
Example:
  horizon webhook test wh_0123456789

\b
Exit code 1 when the receiver has not accepted the request. A test that is
accepted enables a disabled webhook again."""
)
@click.argument("webhook_id")
@output_option
@connected
def test(client: Client, webhook_id: str, output: str) -> int:
    """Send one request to a webhook now, and show how it was answered."""
    sent = client.webhooks.test(webhook_id)
    is_delivered = sent.outcome == "delivered"
    text = f"delivered: HTTP {sent.status_code}" if is_delivered else f"not delivered: {clean(sent.error)}"
    print_result(sent, output, names=[sent.delivery_id], page=lambda: text)
    return 0 if is_delivered else 1


@webhook.command(epilog="\b\nExample:\n  horizon webhook deliveries wh_0123456789")
@click.argument("webhook_id")
@output_option
@connected
def deliveries(client: Client, webhook_id: str, output: str) -> None:
    """List what was sent to a webhook and what is to be sent, newest first."""
    print_list(client.webhooks.deliveries(webhook_id), _DELIVERY_VIEW, output)
