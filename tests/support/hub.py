"""A stand-in for the Hugging Face hub on loopback: the calls of its HTTP interface that `huggingface_hub` makes to read
a model and to upload one, over repositories in memory."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

_LARGE = (".safetensors",)
_INFO = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+?)(?:/revision/(?P<revision>[^/]+))?")
_TREE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")
_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass
class Repository:
    """One repository at one commit. `announced` replaces the sha256 of a file in what the hub says of it."""

    files: dict[str, bytes]
    card: dict[str, Any] = field(default_factory=lambda: {"license": "apache-2.0"})
    commit: str = "1" * 40
    gated_status: HTTPStatus | None = None
    announced: dict[str, str] = field(default_factory=dict)
    hold_at: int | None = None
    """The next transfer of a large file stands still after that many bytes."""
    announced_commit: str | None = None
    """In the place of `commit`, in what the hub says of the repository."""
    private: bool = False


@dataclass
class StandInHub:
    """What the server serves, and what it was asked for."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    """Of contents, by the file's path."""
    resumed_at: list[int] = field(default_factory=list)
    """First bytes of transfers of large files that did not begin at 0."""
    holds: threading.Event = field(default_factory=threading.Event)
    """A transfer stands still now, until its client is gone."""
    uploaded: dict[str, bytes] = field(default_factory=dict)
    """Large contents by sha256."""
    num_uploads: int = 0
    refused_commits: int = 0
    """The next commits that are refused, after their contents have come."""
    tokens: set[str] = field(default_factory=set)
    """That writing calls came with."""

    def add_folder(self, repo: str, folder: Path, **how: Any) -> Repository:
        """Serve the files of a folder as a repository."""
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.repositories[repo] = Repository(files=files, **how)
        return self.repositories[repo]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: StandInHub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/api/whoami-v2":
            self._json({"name": "ada", "type": "user"})
        elif found := _TREE.fullmatch(path):
            self._tree(found["repo"], found["revision"])
        elif found := _RESOLVE.fullmatch(path):
            self._file(**found.groupdict())
        elif found := _INFO.fullmatch(path):
            self._info(found["repo"], found["revision"])
        else:
            self._json({"error": "no such page"}, HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self._body()
        if token := self.headers.get("Authorization", "").removeprefix("Bearer "):
            self.hub.tokens.add(token)
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            known = repo in self.hub.repositories
            made = self.hub.repositories.setdefault(repo, Repository(files={}))
            made.private = made.private or asked.get("visibility") == "private" or bool(asked.get("private"))
            self._json({"url": f"{self.hub.url}/{repo}"}, HTTPStatus.CONFLICT if known else HTTPStatus.OK)
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(_LARGE) else "regular"} for f in files
            ]
            self._json({"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [self._batch(one) for one in json.loads(body)["objects"]]
            self._json({"transfer": "basic", "objects": objects})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/[^/]+", path):
            self._commit(found[1], body)
        else:
            self._json({"error": "no such call"}, HTTPStatus.NOT_FOUND)

    def do_PUT(self) -> None:
        sha256, body = self.path.rpartition("/")[2], self._body()
        assert hashlib.sha256(body).hexdigest() == sha256
        self.hub.uploaded[sha256] = body
        self.hub.num_uploads += 1
        self._json({})

    def _info(self, repo: str, revision: str | None) -> None:
        found = self._repository(repo, revision)
        if found is None:
            return
        siblings = []
        for path, content in found.files.items():
            entry: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": _git_sha1(content)}
            if path.endswith(_LARGE):
                sha256 = found.announced.get(path, hashlib.sha256(content).hexdigest())
                entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        tags = [f"license:{found.card['license']}"] if "license" in found.card else []
        commit = found.commit if found.announced_commit is None else found.announced_commit
        self._json({"id": repo, "sha": commit, "siblings": siblings, "cardData": found.card, "tags": tags})

    def _tree(self, repo: str, revision: str) -> None:
        if (found := self._repository(repo, revision)) is not None:
            self._json(
                [
                    {"type": "file", "path": path, "size": len(content), "oid": _git_sha1(content)}
                    for path, content in found.files.items()
                ]
            )

    def _file(self, repo: str, revision: str, path: str) -> None:
        found = self._repository(repo, revision)
        if found is None:
            return
        if path not in found.files:
            self._refuse(HTTPStatus.NOT_FOUND, "EntryNotFound")
            return
        content = found.files[path]
        is_large = path.endswith(_LARGE)
        sha256 = found.announced.get(path, hashlib.sha256(content).hexdigest())
        etag = sha256 if is_large else _git_sha1(content)
        start, end = 0, len(content)
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(asked[1]), min(end, int(asked[2]) + 1 if asked[2] else end)
        self.send_response(HTTPStatus.PARTIAL_CONTENT if asked else HTTPStatus.OK)
        headers = {"Content-Length": end - start, "ETag": f'"{etag}"', "X-Repo-Commit": found.commit}
        headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": len(content)} if is_large else {}
        headers |= {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"} if asked else {}
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        if is_large and start and end == len(content):
            self.hub.resumed_at.append(start)
        sent, hold_at = content[start:end], found.hold_at if is_large and end == len(content) else None
        with contextlib.suppress(ConnectionError):
            self.wfile.write(sent[:hold_at])
            self.hub.sent_bytes[path] += len(sent[:hold_at])
            if hold_at is not None:
                found.hold_at, self.close_connection = None, True
                self.hub.holds.set()
                # Empty once the client is gone.
                self.rfile.read(1)

    def _repository(self, repo: str, revision: str | None) -> Repository | None:
        found = self.hub.repositories.get(repo)
        if found is None:
            self._refuse(HTTPStatus.NOT_FOUND, "RepoNotFound")
        elif found.gated_status is not None:
            self._refuse(found.gated_status, "GatedRepo")
        elif revision not in (None, "main", found.commit, found.announced_commit):
            self._refuse(HTTPStatus.NOT_FOUND, "RevisionNotFound")
        else:
            return found
        return None

    def _batch(self, one: dict[str, Any]) -> dict[str, Any]:
        if one["oid"] in self.hub.uploaded:
            return one
        return {**one, "actions": {"upload": {"href": f"{self.hub.url}/upload/{one['oid']}"}}}

    def _commit(self, repo: str, body: bytes) -> None:
        if self.hub.refused_commits:
            self.hub.refused_commits -= 1
            self._json({"error": "not now"}, HTTPStatus.FORBIDDEN)
            return
        files = self.hub.repositories[repo].files
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploaded[value["oid"]]
        self._json({"commitUrl": f"{self.hub.url}/{repo}/commit/{'2' * 40}", "commitOid": "2" * 40, "success": True})

    def _refuse(self, status: HTTPStatus, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", "refused by the stand-in")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, plain: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        body = json.dumps(plain).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", "0")))

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@contextmanager
def served_hub() -> Iterator[StandInHub]:
    """Serve a hub without repositories on a free port of loopback until the end of the block."""
    hub = StandInHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


@contextmanager
def used_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[StandInHub]:
    """Serve a hub that the libraries of this process ask, with an empty cache."""
    with served_hub() as hub:
        for name, value in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(constants, name, value)
        yield hub


def _git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
