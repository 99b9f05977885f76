"""The routes of `fedsign ui`: the page, its data as JSON, exports, and resuming."""

import json
import subprocess
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, cast

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import fedsign.report
from fedsign.errors import FedSignError
from fedsign.report import plots
from fedsign.report.chart import Chart
from fedsign.storage.digests import digest_of
from simulations.ui import export
from simulations.ui.curves import MOST_RUNS, OVERS, POINTS, View, overlay
from simulations.ui.details import Details, site_chart
from simulations.ui.files import Folder, SkippedError, text_of
from simulations.ui.index import COMPARISON, RUN, Index
from simulations.ui.listing import Listing
from simulations.ui.resume import Plan, outcome_of, plan_of, start
from simulations.ui.security import Guard

_OWN, _REPORT = Path(__file__).parent / "static", Path(fedsign.report.__file__).parent
ASSETS = {
    **{path.name: path for path in _OWN.iterdir()},
    **{name: _REPORT / name for name in ("tokens.css", "charts.css", "style.css", "plots.js")},
    **{name: _REPORT / "uplot" / name for name in ("uPlot.iife.min.js", "uPlot.min.css")},
}
_TYPES = {".css": "text/css", ".js": "text/javascript", ".html": "text/html"}
# a report may have been changed: only the script of this version runs in it, and as a page of no site
_REPORT_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'; "
    "frame-ancestors 'none'; sandbox allow-scripts; script-src '{}'"
)
_DRAWING = threading.Lock()  # matplotlib's settings are global


class Server:
    """The endpoints over an index."""

    def __init__(self, index: Index, *, token: str, logs: Path, is_read_only: bool) -> None:
        self.index = index
        self.is_read_only = is_read_only
        self._token, self._logs = token, logs
        self._processes: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}

    def app(self, *, host: str, port: int) -> Starlette:
        """The application."""
        routes = [
            Route("/", self.page),
            Route("/static/{name}", self.asset),
            Route("/api/list", _answered(self.entries)),
            Route("/api/keys", _answered(self.keys)),
            Route("/api/chart", _answered(self.chart)),
            Route("/api/differences", _answered(self.differences)),
            Route("/api/run/{id}", _answered(self.run)),
            Route("/api/run/{id}/sites", _answered(self.sites)),
            Route("/run/{id}/report", self.report),
            Route("/export/view.html", self.export_html),
            Route("/export/view.pdf", self.export_pdf),
        ]
        if not self.is_read_only:
            routes += [
                Route("/api/run/{id}/resume", _answered(self.ask)),
                Route("/api/run/{id}/resume", self.resume, methods=["POST"]),
            ]
        return Starlette(
            routes=routes,
            middleware=[Middleware(Guard, host=host, port=port, token=self._token)],
            exception_handlers={FedSignError: _mistake, HTTPException: _missing},
        )

    def page(self, request: Request) -> Response:
        """The page, with the token for changes."""
        text = ASSETS["index.html"].read_text(encoding="utf-8")
        return Response(text.replace("{{token}}", "" if self.is_read_only else self._token), media_type="text/html")

    def asset(self, request: Request) -> Response:
        """A packaged file."""
        path = ASSETS.get(request.path_params["name"])
        if path is None or path.suffix not in _TYPES:
            raise HTTPException(404, "there is no such file")
        return Response(path.read_bytes(), media_type=_TYPES[path.suffix], headers={"cache-control": "no-cache"})

    def entries(self, request: Request) -> tuple[str, Callable[[], Any]]:
        """A page of runs or comparisons, and what the index is doing."""
        self.index.wake()
        given = request.query_params
        progress = dict(self.index.as_json())

        def body() -> Any:
            with self.index.connect() as connection:
                rows = Listing(connection).rows(
                    kind=COMPARISON if given.get("kind") == COMPARISON else RUN,
                    text=given.get("filter", ""),
                    parent=given.get("parent", ""),
                    sort=given.get("sort", "started"),
                    descending=given.get("ascending") != "1",
                    offset=_whole(given.get("offset", "0")),
                    limit=_whole(given.get("limit", "100")),
                    columns=[each for each in given.get("columns", "").split(",") if each],
                )
            roots = [str(root) for root in self.index.roots]
            return {**rows, "index": progress, "roots": roots, "read_only": self.is_read_only}

        return f"{progress['version']} {progress['done']} {progress['is_building']}", body

    def keys(self, request: Request) -> tuple[str, Callable[[], Any]]:
        """All settings and metrics, or those of some runs."""
        ids = [row["id"] for _, row in self._entries(request)]

        def body() -> Any:
            with self.index.connect() as connection:
                return Listing(connection).keys(ids)

        return str(self.index.progress.version), body

    def chart(self, request: Request) -> tuple[str, Callable[[], Any]]:
        """The chart of a view, as `plots.js` draws it."""
        rows = self._entries(request)

        def body() -> Any:
            chart, problems = self._overlay(rows, _view(request))
            return _as_json(chart) | {"problems": problems}

        return " ".join(row["signature"] for _, row in rows), body

    def differences(self, request: Request) -> tuple[str, Callable[[], Any]]:
        """The settings in which the runs of a view differ."""
        rows = self._entries(request)

        def body() -> Any:
            ids = [row["id"] for _, row in rows]
            with self.index.connect() as connection:
                listing = Listing(connection)
                return {"labels": listing.labels(ids), "settings": listing.differences(ids)}

        return " ".join(row["signature"] for _, row in rows), body

    def run(self, request: Request) -> tuple[str, Callable[[], Any]]:
        """One run."""
        folder, row = self._entry(request.path_params["id"])
        process, log = self._processes.get(row["id"], (None, self._logs))
        failure = outcome_of(process, log) if process is not None else ""

        def body() -> Any:
            with self.index.connect() as connection:
                facts = Listing(connection).facts([row["id"]])[row["id"]]
                notes = json.loads(row["notes"])
            details = Details(folder).as_json()
            details["problems"] = [*dict.fromkeys([*notes, *details["problems"]])]
            has_report = folder.has("report.html")
            known = {"id": row["id"], "name": row["name"], "parent": row["parent"], "path": text_of(folder.path, 4096)}
            can_resume = not self.is_read_only and facts.get("status") in ("unfinished", "failed")
            known |= {"has_report": has_report, "can_resume": can_resume, "resume_failure": failure}
            return {**known, "facts": facts, **details}

        return f"{row['signature']} {self.index.progress.version} {failure}", body

    def sites(self, request: Request) -> tuple[str, Callable[[], Any]]:
        """The chart of a metric at a run's sites."""
        folder, row = self._entry(request.path_params["id"])
        return row["signature"], lambda: _as_json(site_chart(folder, request.query_params.get("key", "loss")))

    def report(self, request: Request) -> Response:
        """A run's report.html, in which no script but our own runs."""
        folder, _ = self._entry(request.path_params["id"])
        try:
            content = folder.read("report.html")
        except FileNotFoundError:
            raise HTTPException(404, "this run has no report.html; 'fedsign report' makes one") from None
        policy = _REPORT_POLICY.format(plots.script_hash())
        return Response(content, media_type="text/html", headers={"content-security-policy": policy})

    def export_html(self, request: Request) -> Response:
        """The view as one file."""
        charts, table = self._exported(request)
        return _download(export.html(charts, *table).encode(), "text/html", "fedsign-runs.html")

    def export_pdf(self, request: Request) -> Response:
        """The view's charts, drawn by matplotlib."""
        charts, _ = self._exported(request)
        with _DRAWING:
            return _download(export.pdf(charts), "application/pdf", "fedsign-runs.pdf")

    def ask(self, request: Request) -> tuple[str, Callable[[], Any]]:
        """What resuming would run and import."""
        plan = self._plan(request.path_params["id"])
        shown = {"command": plan.command, "modules": plan.modules, "where": str(plan.where), "digest": plan.digest}
        return plan.digest, lambda: shown

    async def resume(self, request: Request) -> Response:
        """Resume what was shown, if that is still the same."""
        try:
            agreed = json.loads(await request.body())["digest"]
        except (ValueError, KeyError, TypeError):
            return JSONResponse({"error": "the request does not say what was agreed to."}, 400)
        return await run_in_threadpool(self._resume, request.path_params["id"], str(agreed))

    def _resume(self, id: str, agreed: str) -> Response:
        plan = self._plan(id)
        if plan.digest != agreed:
            return JSONResponse({"error": "the configuration has changed since it was shown; look again."}, 409)
        log = self._logs / f"resume-{id}.log"
        process = start(plan, log)
        self._processes[id] = (process, log)
        self.index.wake()
        return JSONResponse({"command": plan.command, "process": process.pid})

    def _plan(self, id: str) -> Plan:
        folder, row = self._entry(id)
        comparison = self.index.folder(row["parent"], COMPARISON) if row["parent"] else None
        return plan_of(folder, comparison and comparison[0])

    def _entry(self, id: str) -> tuple[Folder, Any]:
        found = self.index.folder(id)
        if found is None:
            raise HTTPException(404, "there is no such run; it may have been removed")
        return found

    def _entries(self, request: Request) -> Sequence[tuple[Folder, Any]]:
        ids = [each for each in request.query_params.get("ids", "").split(",") if each]
        return [found for id in [*dict.fromkeys(ids)][:MOST_RUNS] if (found := self.index.folder(id)) is not None]

    def _overlay(self, rows: Sequence[tuple[Folder, Any]], view: View) -> tuple[Chart, list[str]]:
        with self.index.connect() as connection:
            labels = Listing(connection).labels([row["id"] for _, row in rows])
        return overlay([folder for folder, _ in rows], labels, view)

    def _exported(self, request: Request) -> tuple[list[Chart], tuple[list[str], dict[str, list[float | str | None]]]]:
        rows = self._entries(request)
        if not rows:
            raise SkippedError("the view has no runs; select some.")
        keys = [each for each in request.query_params.get("key", "loss").split(",") if each][:6]
        charts = [self._overlay(rows, _view(request, key))[0] for key in keys]
        ids = [row["id"] for _, row in rows]
        with self.index.connect() as connection:
            listing = Listing(connection)
            return charts, (listing.labels(ids), listing.differences(ids))


def _answered(endpoint: Callable[[Request], tuple[str, Callable[[], Any]]]) -> Callable[[Request], Response]:
    """JSON with an ETag, so that polling a page that has not changed costs nothing."""

    @wraps(endpoint)
    def answer(request: Request) -> Response:
        state, body = endpoint(request)
        tag = f'"{digest_of(state.encode("utf-8", "replace"), str(request.url).encode())}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        return JSONResponse(body(), headers={"etag": tag})

    return answer


def _view(request: Request, key: str = "") -> View:
    given = request.query_params
    return View(
        key=key or given.get("key", "loss"),
        over=next((each for each in OVERS if each == given.get("x", "rounds")), "rounds"),
        smooth=_whole(given.get("smooth", "1")),
        log_x=given.get("logx") == "1",
        log_y=given.get("logy") == "1",
    )


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise SkippedError(f"'{text}' was given; expected a whole number.")
    return int(text)


def _as_json(chart: Chart) -> dict[str, Any]:
    return {
        "problems": [],
        "title": chart.title,
        "description": chart.description,
        "note": chart.note,
        "legend": [{"name": name, "color": each.color % 8 + 1, "dash": each.dashes, "value": value}
                   for name, each, value in plots.legend(chart)],
        "chart": json.loads(plots.data(chart, POINTS)),
    }  # fmt: skip


def _download(content: bytes, media_type: str, name: str) -> Response:
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type=media_type, headers=headers)


def _mistake(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400)


def _missing(request: Request, error: Exception) -> Response:
    found = cast(HTTPException, error)  # the only class that it is registered for
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": f"{found.detail}."}, found.status_code)
    return PlainTextResponse(f"{found.detail}.\n", found.status_code)
