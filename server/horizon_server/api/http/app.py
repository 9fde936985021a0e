"""REST, the web page and /metrics as one FastAPI app. Reads only; the services decide who may see what."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from importlib import resources
from typing import Any

from fastapi import Depends, FastAPI, Response

from horizon_server.api.http.bodies import ReadyBody, VersionBody
from horizon_server.api.http.curve import Curves
from horizon_server.api.http.problems import install_handlers
from horizon_server.api.http.routes import router
from horizon_server.api.http.security import RequestMiddleware, authenticated
from horizon_server.api.open_streams import OpenStreams
from horizon_server.api.services import Services
from horizon_server.telemetry.metrics import Metrics
from horizon_server.version import VERSION

_STYLE_MARK = "/*style*/"
_SCRIPT_MARK = "/*script*/"


def make_app(
    services: Services, metrics: Metrics, *, metrics_open: bool, version: str = VERSION, ready: Callable[[], str | None]
) -> FastAPI:
    """Return the app. `metrics_open`: /metrics answers without a token. `ready` returns why the daemon takes no work, or None."""
    app = FastAPI(
        title="horizon",
        version=version,
        description="Status of a horizon daemon. Everything that changes something goes through gRPC.",
        docs_url=None,  # these pages load scripts from other sites
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
    )
    app.state.services = services
    app.state.streams = OpenStreams()
    app.state.curves = Curves()
    app.add_middleware(RequestMiddleware, on_http=metrics.on_http)
    install_handlers(app)
    _add_health(app, ready)
    _add_metrics(app, [] if metrics_open else [Depends(authenticated)], metrics)
    _add_front(app, version)
    app.include_router(router)
    return app


def _add_health(app: FastAPI, ready: Callable[[], str | None]) -> None:
    """Without a token everywhere: probes and load balancers have none, and the answers show nothing of the daemon's work."""

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Say that the process answers."""
        return {"status": "ok"}

    @app.get("/readyz", responses={503: {"model": ReadyBody}})
    async def readyz(response: Response) -> ReadyBody:
        """Say whether the daemon takes work; 503 and why not while it starts or drains."""
        why_not = ready()
        if why_not is None:
            return ReadyBody(ready=True, message="")
        response.status_code = 503
        return ReadyBody(ready=False, message=why_not)


def _add_metrics(app: FastAPI, guards: list[Any], metrics: Metrics) -> None:
    exposition: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @app.get("/metrics", dependencies=guards, response_class=Response, responses=exposition)
    async def show_metrics() -> Response:
        """Show the metrics for Prometheus."""
        body, content_type = metrics.render()
        return Response(body, headers={"Content-Type": content_type})


def _add_front(app: FastAPI, version: str) -> None:
    page, policy = _load_page()

    # Not in the schema: it documents what scripts read.
    @app.get("/", include_in_schema=False)
    async def show_page() -> Response:
        return Response(page, media_type="text/html", headers={"Content-Security-Policy": policy})

    @app.get("/version")
    async def show_version() -> VersionBody:
        """Show the daemon's version."""
        return VersionBody(version=version)


def _load_page() -> tuple[bytes, str]:
    """Return the one self-contained document, and the policy that lets exactly its own script and style run."""
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
