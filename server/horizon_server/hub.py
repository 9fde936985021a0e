"""Models of the Hugging Face hub: what a repository says of itself, an outline of its weights, and its files, verified.

Only `horizond model add` and `horizond plan` ask the hub, in processes of their own; the daemon never does. Of a
repository only config, tokenizer, texts and safetensors weights are taken: no code, no pickle. Without a network, a
revision that is whole in the account's own Hugging Face cache is used.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

from huggingface_hub import HfApi, ModelCard, ModelInfo, constants, get_session, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from horizon_formats.model_files import is_adapter, is_hub_id, is_pickle, pushed_names
from horizon_server.durable import PARTIAL_SUFFIX
from horizon_server.errors import InvalidModel, InvalidSpec, IoFailed, NotAllowed, NotFound
from horizon_server.records.blob import BlobFile
from horizon_server.store.model_card import SOURCE_FILE
from horizon_server.store.model_files import CONFIG_FILE, MAX_CONFIG_BYTES
from horizon_server.store.safetensors_files import write_outline, write_text

_TRANSPORT_ERROR = cast(type[Exception], HfHubHTTPError.__mro__[1])
"""What the hub's library raises where no answer comes: the error of its HTTP library, which is httpx or httpx2."""
_TIMEOUT_S = 60.0
_WEIGHTS = "model.safetensors"
_INDEX = f"{_WEIGHTS}.index.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PIECE_BYTES = 1 << 20
_NUM_TRANSFERS = 4
# In a row, of a transfer in which nothing arrives.
_MAX_FAILURES = 5
# What is read before the weights are fetched: sizes, and whether there is code.
_READ_FIRST = (CONFIG_FILE, "tokenizer_config.json")


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """One file of a repository. The hub gives the sha256 of large files and the git hash of small ones; what it does
    not give is empty."""

    path: str
    size_bytes: int
    sha256: str = ""
    git_sha1: str = ""


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """One commit of a repository: the files that a job needs."""

    repo: str
    commit: str
    licence: str
    """As its page names it, such as apache-2.0; empty where it names none."""
    files: tuple[HubFile, ...]
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    """Name, format and shape of each of its weights, as the headers of the files say; empty with a snapshot."""
    snapshot: Path | None = None
    """Where all files are in the account's Hugging Face cache, from which they are copied."""

    @property
    def size_bytes(self) -> int:
        """Bytes over all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def source(self) -> str:
        """The content of `SOURCE_FILE`."""
        return json.dumps({"repo": self.repo, "commit": self.commit, "license": self.licence}, indent=2) + "\n"


def find_model(repo: str, revision: str | None) -> HubModel:
    """Return what the hub says of a repository at a revision, None for its default branch; without a network, what the
    account's cache has of it.

    Raises:
        NotFound: there is no such repository or revision for this account; or no network, and not all of it is here.
        NotAllowed: the repository is gated, and this account may not read it.
        InvalidModel: it has no safetensors weights of a model.
    """
    try:
        with _hub_errors(repo, revision):
            info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
            names = {file.rfilename for file in info.siblings or ()}
            _check_names(repo, names)
            metadata = HfApi().get_safetensors_metadata(repo, revision=info.sha, timeout=_TIMEOUT_S)
    except (OfflineModeIsEnabled, _TRANSPORT_ERROR) as error:
        return _find_cached(repo, revision, why=error)
    # Both become names of folders.
    if not is_hub_id(info.id) or not _COMMIT.fullmatch(info.sha or ""):
        raise InvalidModel(f"the hub names {repo} {info.id!r:.80} at {info.sha!r:.80}, which no repository is")
    wanted = _wanted(names, weights=set(metadata.files_metadata))
    files = tuple(
        HubFile(
            path=file.rfilename,
            size_bytes=file.size or 0,
            sha256=file.lfs.sha256 if file.lfs else "",
            git_sha1="" if file.lfs else file.blob_id or "",
        )
        for file in info.siblings or ()
        if file.rfilename in wanted
    )
    tensors = tuple(
        (name, tensor.dtype, tuple(tensor.shape))
        for header in metadata.files_metadata.values()
        for name, tensor in header.tensors.items()
    )
    model = HubModel(repo=info.id, commit=str(info.sha), licence=_licence(info), files=files, tensors=tensors)
    snapshot, _ = _snapshot(model.repo, model.commit)
    is_whole = snapshot is not None and all((snapshot / file.path).is_file() for file in files)
    return replace(model, snapshot=snapshot) if is_whole else model


def write_model_outline(model: HubModel, folder: Path) -> Path:
    """Return a folder with the config of a model and its tensors' headers, from which a job is planned: `folder`, in
    which the weights take no space; or its snapshot in the cache. No weight is fetched. Raises as `find_model` does."""
    if model.snapshot is not None:
        return model.snapshot
    with _unreachable(model.repo), _hub_errors(model.repo, model.commit):
        for file in model.files:
            if file.path in _READ_FIRST:
                _fetch(model, file, folder)
    write_outline(folder / _WEIGHTS, model.tensors)
    return folder


def fetch_model(
    model: HubModel, folder: Path, *, advance: Callable[[int], None] = lambda num_bytes: None
) -> list[BlobFile]:
    """Fetch all files of a model into `folder`, and write there where it comes from; return them. What is there already
    is not fetched again, and a file that was cut continues where it was cut. `advance` is given bytes as they are
    there.

    Raises:
        InvalidModel: a file is not what the hub says; it is removed.
        IoFailed: the hub does not answer; what has arrived stays.
    """

    def fetched(file: HubFile) -> BlobFile:
        with _unreachable(model.repo), _hub_errors(model.repo, model.commit):
            _fetch(model, file, folder, advance)
        return BlobFile(path=file.path, sha256=_verified(model, file, folder / file.path), size_bytes=file.size_bytes)

    with ThreadPoolExecutor(max_workers=_NUM_TRANSFERS) as pool:
        transfers = [pool.submit(fetched, file) for file in model.files]
        try:
            found = [transfer.result() for transfer in transfers]
        except BaseException:
            # The others are at most one piece away from their end.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    written = write_text(folder / SOURCE_FILE, model.source)
    return [*found, BlobFile(path=SOURCE_FILE, sha256=written.sha256, size_bytes=written.size_bytes)]


def _fetch(
    model: HubModel, file: HubFile, folder: Path, advance: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Have a file in `folder`, whole but not verified."""
    if file.path == CONFIG_FILE and file.size_bytes > MAX_CONFIG_BYTES:
        raise InvalidModel(f"{CONFIG_FILE} of {model.repo} is larger than {MAX_CONFIG_BYTES} bytes, as no config is")
    target = folder / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and target.stat().st_size == file.size_bytes:
        advance(file.size_bytes)
        return
    # The library's own download forgets what a process that was killed had of a file.
    part = target.with_name(f"{target.name}{PARTIAL_SUFFIX}")
    had_bytes = part.stat().st_size if part.exists() else 0
    advance(had_bytes)
    failures = 0
    while had_bytes < file.size_bytes:
        try:
            if model.snapshot is None:
                _append(part, hf_hub_url(model.repo, file.path, revision=model.commit), file, advance)
            else:
                shutil.copyfile(model.snapshot / file.path, part)
                advance(file.size_bytes - had_bytes)
        except _TRANSPORT_ERROR as error:
            failures = 0 if part.exists() and part.stat().st_size > had_bytes else failures + 1
            if failures == _MAX_FAILURES or isinstance(error, HfHubHTTPError):
                raise
            time.sleep(2.0**failures)
        had_bytes = part.stat().st_size if part.exists() else 0
    part.touch()
    part.replace(target)


def _append(part: Path, url: str, file: HubFile, advance: Callable[[int], None]) -> None:
    """Append what a file still lacks, up to its announced size."""
    with part.open("ab") as stream:
        headers = {**build_hf_headers(), "Range": f"bytes={stream.tell()}-"}
        with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True) as answer:
            if answer.is_error:
                answer.read()
                hf_raise_for_status(answer)
            if answer.status_code != HTTPStatus.PARTIAL_CONTENT:
                advance(-stream.tell())
                stream.truncate(0)
            for piece in answer.iter_bytes(_PIECE_BYTES):
                if stream.tell() + len(piece) > file.size_bytes:
                    raise InvalidModel(
                        f"the hub sends more of {file.path} than the {file.size_bytes} bytes that it announces; run "
                        "the same command again, and if that repeats, check the proxy or mirror in between"
                    )
                stream.write(piece)
                advance(len(piece))


def _verified(model: HubModel, file: HubFile, path: Path) -> str:
    """The sha256 of a file that has arrived, compared with what the hub gives of it."""
    sha256, git_sha1 = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE_BYTES):
            sha256.update(piece)
            if file.git_sha1:
                git_sha1.update(piece)
    for kind, wanted, got in (
        ("sha256", file.sha256, sha256.hexdigest()),
        ("git hash", file.git_sha1, git_sha1.hexdigest()),
    ):
        if wanted and wanted != got:
            path.unlink()
            raise InvalidModel(
                f"{file.path} of {model.repo} has the {kind} {got}, and the hub announces {wanted}; the file is "
                "removed: run the same command again, and if that repeats, check the proxy or mirror in between"
            )
    return sha256.hexdigest()


def _check_names(repo: str, names: set[str]) -> None:
    if is_adapter(names):
        raise InvalidModel(
            f"{repo} is an adapter, not a model; download it (hf download {repo} --local-dir DIR), then push it "
            "(horizon model push DIR)"
        )
    if CONFIG_FILE not in names:
        raise InvalidModel(f"{repo} has no {CONFIG_FILE}; give the repository of a model in the format of transformers")
    if not {_WEIGHTS, _INDEX} & names:
        pickles = any(is_pickle(name) for name in names)
        why = "only pickles (.bin), which can run code when they are opened and are never taken" if pickles else "none"
        raise InvalidModel(
            f"{repo} must have safetensors weights ({_WEIGHTS} or its index), and has {why}; give a repository or a "
            "--revision with safetensors"
        )


def _wanted(names: set[str], *, weights: set[str]) -> set[str]:
    """The files that are taken: of the safetensors only the model's own, not a second copy in another layout."""
    return {name for name in pushed_names(names) if name in weights or not name.endswith(".safetensors")}


def _licence(info: ModelInfo) -> str:
    named = _named_licence(info.card_data.to_dict()) if info.card_data is not None else ""  # type: ignore[no-untyped-call]
    return named or next((tag.partition(":")[2] for tag in info.tags or () if tag.startswith("license:")), "")


def _named_licence(card: Mapping[str, Any]) -> str:
    """The licence in the head of a model's page: `other` has a name of its own."""
    found = (card.get("license_name") if card.get("license") == "other" else None) or card.get("license")
    return found if isinstance(found, str) else ""


def _find_cached(repo: str, revision: str | None, *, why: Exception) -> HubModel:
    """What the account's own Hugging Face cache has of a revision."""
    snapshot, missing = _snapshot(repo, revision)
    if snapshot is None:
        raise NotFound(
            f"the hub does not answer ({str(why).splitlines()[0]:.200}), and {missing} of {repo} is not in this "
            f"account's Hugging Face cache; connect the node, or copy the cache of a machine that has the model (hf "
            f"download {repo})"
        )
    names = {path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()}
    files = tuple(_cached_file(snapshot, name) for name in sorted(_wanted(names, weights=_weights_of(snapshot))))
    return HubModel(repo=repo, commit=snapshot.name, licence=_card_licence(snapshot), files=files, snapshot=snapshot)


def _snapshot(repo: str, revision: str | None) -> tuple[Path | None, str]:
    """The folder of a revision in the account's cache where all its weights are there; else a file that is missing."""
    config = try_to_load_from_cache(repo, CONFIG_FILE, revision=revision, cache_dir=constants.HF_HUB_CACHE)
    if not isinstance(config, str):
        return None, CONFIG_FILE
    snapshot = Path(config).parent
    missing = next((name for name in sorted(_weights_of(snapshot)) if not (snapshot / name).is_file()), None)
    return (snapshot, "") if missing is None else (None, missing)


def _weights_of(snapshot: Path) -> set[str]:
    if (snapshot / _WEIGHTS).is_file() or not (snapshot / _INDEX).is_file():
        return {_WEIGHTS}
    return set(json.loads((snapshot / _INDEX).read_bytes())["weight_map"].values())


def _card_licence(snapshot: Path) -> str:
    card = snapshot / "README.md"
    if not card.is_file():
        return ""
    return _named_licence(ModelCard.load(card, ignore_metadata_errors=True).data.to_dict())


def _cached_file(snapshot: Path, name: str) -> HubFile:
    place = (snapshot / name).resolve()
    # The cache names contents by their hash.
    is_hash = all(letter in "0123456789abcdef" for letter in place.name)
    return HubFile(
        path=name,
        size_bytes=place.stat().st_size,
        sha256=place.name if is_hash and len(place.name) == 64 else "",
        git_sha1=place.name if is_hash and len(place.name) == 40 else "",
    )


@contextmanager
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """What the hub refuses, as this program says it."""
    try:
        yield
    except GatedRepoError as error:
        raise NotAllowed(
            f"{repo} is gated: accept its terms on https://huggingface.co/{repo}, then give a token of that account "
            "(hf auth login, or HF_TOKEN in the environment), and run the same command again"
        ) from error
    except RevisionNotFoundError as error:
        raise NotFound(f"{repo} has no revision {revision}; give a branch, a tag or a commit of it") from error
    except RepositoryNotFoundError as error:
        raise NotFound(
            f"the hub has no model {repo} that this account may read; check the id, and for a private one give a "
            "token (hf auth login, or HF_TOKEN in the environment)"
        ) from error
    except HFValidationError as error:
        raise InvalidSpec(f"{repo!r:.100} is not the id of a model on the hub, such as Qwen/Qwen3-8B") from error
    except LocalEntryNotFoundError:  # no answer
        raise
    except (NotASafetensorsRepoError, SafetensorsParsingError, EntryNotFoundError) as error:
        raise InvalidModel(f"the weights of {repo} cannot be read: {str(error).splitlines()[0]:.200}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise NotAllowed(
                f"the hub refuses to show {repo} ({status}): give a token that may read it (hf auth login, or HF_TOKEN "
                "in the environment)"
            ) from error
        raise IoFailed(f"the hub answers {status} for {repo}; run the same command again later") from error


@contextmanager
def _unreachable(repo: str) -> Iterator[None]:
    """No answer in the middle of a transfer."""
    try:
        yield
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, _TRANSPORT_ERROR) as error:
        raise IoFailed(
            f"the transfer of {repo} was cut ({str(error).splitlines()[0] if str(error) else type(error).__name__}); "
            "what has arrived is kept: the same command continues from there"
        ) from error
