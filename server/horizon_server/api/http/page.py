"""The web page: one self-contained document and the policy that lets exactly its own script and style run."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

_STYLE_MARK = "/*style*/"
_SCRIPT_MARK = "/*script*/"


def load_page() -> tuple[bytes, str]:
    """Return the page and its Content-Security-Policy."""
    folder = resources.files("horizon_server.api.http") / "web"
    document, style, script = ((folder / name).read_text("utf-8") for name in ("page.html", "page.css", "page.js"))
    assert document.count(_STYLE_MARK) == 1
    assert document.count(_SCRIPT_MARK) == 1
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_hash_of(script)}'",
            f"style-src '{_hash_of(style)}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )
    return document.replace(_STYLE_MARK, style).replace(_SCRIPT_MARK, script).encode(), policy


def _hash_of(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
