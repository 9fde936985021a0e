"""The Hugging Face hub, where results are published and whose models are planned from their config. Needs the extra
`hub`; nothing else in this package does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horizon_client.errors import BadConfig, InvalidRequest, NotAllowed, NotFound, Unavailable
from horizon_formats.model_files import CONFIG_FILE, is_hub_id

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_SCHEME = "hf:"
_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class HubPush:
    """A checkpoint that was published: the repository, and the page of the commit that holds it."""

    repo: str
    url: str


def repo_of(target: str) -> str:
    """Return the repository that `hf:ORG/NAME` means. Raises InvalidRequest for anything else."""
    repo = target.removeprefix(_SCHEME)
    if repo == target or not is_hub_id(repo):
        raise InvalidRequest.of("target", f"target is {target!r:.100}; write hf:ORG/NAME, such as hf:my-lab/gsm8k-lora")
    return repo


def fetch_config(repo: str) -> bytes:
    """Return the config.json of a model of the hub. Blocking.

    Raises:
        BadConfig: when the extra `hub` is not installed.
        NotFound, NotAllowed, Unavailable: as the hub answers.
    """
    api = _api(None)
    with _hub_errors(repo):
        return Path(api.hf_hub_download(repo, CONFIG_FILE, etag_timeout=_TIMEOUT_S)).read_bytes()


def publish(
    folder: Path, repo: str, *, private: bool | None, token: str | None, left_out: Sequence[str], message: str
) -> HubPush:
    """Make the repository where it is missing, and a commit there of the files in a folder but those `left_out`;
    return it. Contents that the hub has are not sent again. Blocking; prints the library's own progress.

    Raises:
        BadConfig: when the extra `hub` is not installed.
        NotAllowed, Unavailable: as the hub answers.
    """
    api = _api(token)
    with _hub_errors(repo):
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo, folder_path=folder, ignore_patterns=[*left_out, "*.part"], commit_message=message
        )
    return HubPush(repo=repo, url=str(commit.commit_url))


def require_hub() -> None:
    """Let pass where the extra is installed, before anything long is done. Raises BadConfig."""
    _api(None)


def _api(token: str | None) -> HfApi:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise BadConfig("this needs the package huggingface_hub: pip install 'horizon-train[hub]'") from error
    return HfApi(token=token)


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """What the hub refuses, as this program says it."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    # What its HTTP library, httpx or httpx2, raises where no answer comes
    transport: Any = HfHubHTTPError.__mro__[1]
    try:
        yield
    except GatedRepoError as error:
        raise NotAllowed(
            f"{repo} is gated: accept its terms on https://huggingface.co/{repo}, and log in: hf auth login"
        ) from error
    except LocalEntryNotFoundError as error:
        raise Unavailable(f"the hub does not answer, and {repo} is not in your cache; try again later") from error
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        raise NotFound(
            f"the hub has no {repo} that you may use, or it is not a model; check the id, and for a private one log "
            "in (hf auth login) or give a token"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise NotAllowed(
                f"the hub does not let you use {repo} ({status}): log in with a token that may (hf auth login), or "
                "give one with --hub-token-file"
            ) from error
        raise Unavailable(f"the hub answers {status} for {repo}: {str(error).splitlines()[0]:.200}") from error
    # The library gives a transfer that failed as a RuntimeError
    except (OfflineModeIsEnabled, RuntimeError, transport) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Unavailable(f"the hub does not answer ({why:.200}); repeat the command to continue") from error
