"""The web page: one document for all of its addresses, and a fixed list of scripts and styles beside it.

Scripts and styles lie below a folder whose name is a hash over all of them. Such an address never has other content,
so a browser keeps it for good; the document names the folder, and is asked for again each time.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

ADDRESSES = (
    "/",
    "/jobs",
    "/jobs/{job}",
    "/new",
    "/compare",
    "/queue",
    "/usage",
    "/models",
    "/datasets",
)
"""Where the document is shown; its own script decides what it shows there."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Nothing but our own files, and nothing written into the document, may run."""

_DOCUMENT = "index.html"
_FOLDER_MARK = "{folder}"
_PRELOAD_MARK = "<!-- modules -->"
_FOREVER = "public, max-age=31536000, immutable"
_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}


@dataclass(frozen=True, kw_only=True)
class WebFile:
    """One script, style or picture as it is sent."""

    content: bytes
    media_type: str
    zipped: bytes
    """The content as gzip packs it."""


@dataclass(frozen=True, kw_only=True)
class WebPage:
    """The document, the files beside it by their relative path, and the hash over all of them."""

    document: bytes
    files: Mapping[str, WebFile]
    digest: str

    @classmethod
    def load(cls) -> WebPage:
        """Read the page as it is installed."""
        folder = resources.files("horizon_server.api.http") / "web"
        files = dict(sorted(_files_below(folder, "")))
        digest = hashlib.sha256()
        document = (folder / _DOCUMENT).read_text("utf-8")
        digest.update(document.encode())
        for path, file in files.items():
            digest.update(f"{path}\0{len(file.content)}\0".encode())
            digest.update(file.content)
        name = digest.hexdigest()[:16]
        # All modules at once: a browser would find each only in the one that imports it, one trip after another.
        modules = [
            path for path in files if path.endswith(".js") and re.search(rb"\bexport\b[ {]", files[path].content)
        ]
        preloads = "\n".join(f'<link rel="modulepreload" href="{_FOLDER_MARK}/{path}">' for path in modules)
        document = document.replace(_PRELOAD_MARK, preloads).replace(_FOLDER_MARK, f"/web/{name}")
        assert not re.search(r"\s(?:style|on\w+)=", document), "the policy forbids styles and scripts in the document"
        return cls(document=document.encode(), files=files, digest=name)

    @property
    def size_bytes(self) -> int:
        """What a browser that opens the page for the first time receives."""
        return len(self.document) + sum(len(file.zipped) for file in self.files.values())


def _files_below(folder: Traversable, prefix: str) -> list[tuple[str, WebFile]]:
    found: list[tuple[str, WebFile]] = []
    for entry in folder.iterdir():
        path = f"{prefix}{entry.name}"
        if entry.is_dir():
            found += _files_below(entry, f"{path}/")
        elif media_type := _TYPES.get(path[path.rfind(".") :]):
            content = entry.read_bytes()
            zipped = gzip.compress(content, mtime=0)
            found.append((path, WebFile(content=content, media_type=media_type, zipped=zipped)))
    return found


def add_web_page(app: FastAPI) -> None:
    """Add the page's routes. They need no token: the page asks for one, and shows nothing without it."""
    page = WebPage.load()
    tag = f'"{page.digest}"'
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache", "ETag": tag}

    async def show_page(request: Request) -> Response:
        if request.headers.get("If-None-Match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(page.document, media_type="text/html", headers=headers)

    async def show_file(request: Request, digest: str, path: str) -> Response:
        file = page.files.get(path)
        # Files of an earlier version are gone: the document that named them is asked for again on a reload.
        if file is None or digest != page.digest:
            raise HTTPException(404)
        headers = {"Content-Type": file.media_type, "Cache-Control": _FOREVER, "Vary": "Accept-Encoding"}
        if "gzip" not in request.headers.get("Accept-Encoding", ""):
            return Response(file.content, headers=headers)
        return Response(file.zipped, headers={**headers, "Content-Encoding": "gzip"})

    # Not in the schema: it documents what scripts read.
    for address in ADDRESSES:
        app.add_api_route(address, show_page, include_in_schema=False)
    app.add_api_route("/web/{digest}/{path:path}", show_file, include_in_schema=False)
