"""A hub on loopback: requests are recorded, connections cut, repositories gated."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

LARGE_BYTES = 50_000
"""Files from this size on are in the store."""
TOKEN = "hf_allowed"
"""Gives access to gated repositories; any other token does not."""
PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


class Repository(NamedTuple):
    """A model or a data set: its files at each commit, and commits of branches and tags."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gated: bool


class Asked(NamedTuple):
    method: str
    path: str
    range: str = ""
    status: int = 200


@dataclass
class Hub:
    endpoint: str
    store: str
    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    """By kind (``models``, ``datasets``) and name."""
    asked: list[Asked] = field(default_factory=list)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """By a file's name, after how many bytes its next connections are cut."""

    def add(
        self, kind: str, name: str, *versions: dict[str, bytes], gated: bool = False, tag: str = ""
    ) -> tuple[str, ...]:
        """Add a repository with a commit for each version, and return the commits."""
        commits = [_sha1(f"{name} {number}".encode()) for number in range(len(versions))]
        contents = dict(zip(commits, versions, strict=True))
        refs = {"main": commits[-1], tag: commits[0]}
        self.repositories[kind, name] = Repository(contents, refs, gated)
        return tuple(commits)

    def downloads(self, name: str) -> list[Asked]:
        """Return the requests for the content of files whose path ends in ``name``."""
        got = (each for each in self.asked if each.method == "GET" and each.status in (200, 206))
        return [each for each in got if each.path.endswith(f"/{name}")]


@contextmanager
def loopback_hub(home: Path) -> Iterator[Hub]:
    """Serve an empty hub, and its store on another host: clients follow redirects for content.

    Processes started meanwhile use it, whatever the environment says of the real one.

    Args:
        home: The clients' cache.
    """
    with (
        pytest.MonkeyPatch.context() as patch,
        ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server,
        ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as store,
    ):
        hub = Hub(f"http://127.0.0.1:{server.server_port}", f"http://127.0.0.1:{store.server_port}")
        for each in (server, store):
            each.hub = hub  # type: ignore[attr-defined]
            threading.Thread(target=each.serve_forever, name="hub", daemon=True).start()
        for name in ("HF_HUB_OFFLINE", "HF_TOKEN", *PROXIES):
            patch.delenv(name, raising=False)
        patch.setenv("HF_ENDPOINT", hub.endpoint)
        patch.setenv("HF_HOME", str(home))
        patch.setenv("HF_HUB_DISABLE_XET", "1")
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        yield hub
        for each in (server, store):
            each.shutdown()


class _RefusedError(Exception):
    def __init__(self, status: int, code: str, **headers: str) -> None:
        self.status = status
        self.headers = {"X-Error-Code": code} | headers


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    _cut: int | None = None
    """After how many bytes this connection is cut."""

    def do_GET(self) -> None:
        self.hub: Hub = self.server.hub  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        try:
            match [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]:
                case ["store", kind, owner, name, commit, *path]:
                    self._stored(self._files(kind, f"{owner}/{name}", commit)[1]["/".join(path)])
                case ["api", kind, owner, name, "paths-info", revision]:
                    self._paths_info(self._files(kind, f"{owner}/{name}", revision)[1], body)
                case ["api", kind, owner, name, *rest]:
                    self._about(kind, f"{owner}/{name}", rest)
                case ["datasets", owner, name, "resolve", revision, *path]:
                    self._resolve("datasets", f"{owner}/{name}", revision, "/".join(path))
                case [owner, name, "resolve", revision, *path]:
                    self._resolve("models", f"{owner}/{name}", revision, "/".join(path))
                case _:
                    raise _RefusedError(404, "")
        except _RefusedError as refused:
            self._answer(refused.status, b"{}", **refused.headers)

    do_HEAD = do_POST = do_GET  # noqa: N815 - the names that http.server calls

    def _repository(self, kind: str, name: str) -> Repository:
        if (found := self.hub.repositories.get((kind, name))) is None:
            raise _RefusedError(401, "RepoNotFound", **{"X-Error-Message": "Repository not found"})
        return found

    def _files(self, kind: str, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        """Return the commit that a branch, a tag or a commit names, and its files."""
        repository = self._repository(kind, name)
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            raise _RefusedError(404, "RevisionNotFound")
        return commit, repository.commits[commit]

    def _paths_info(self, files: dict[str, bytes], body: str) -> None:
        is_json = self.headers.get("Content-Type", "").startswith("application/json")
        wanted = json.loads(body)["paths"] if is_json else parse_qs(body).get("paths", [])
        self._json([_entry(path, content) for path, content in files.items() if path in wanted])

    def _about(self, kind: str, name: str, rest: list[str]) -> None:
        commit, files = self._files(kind, name, rest[1] if len(rest) > 1 else "main")
        if rest[:1] == ["tree"]:
            below = "/".join(rest[2:])
            entries = (_entry(path, files[path]) for path in files if path.startswith(below))
            return self._json(list(entries))
        siblings = [
            {"rfilename": path, "size": len(content), "blobId": _sha1(content)}
            for path, content in files.items()
        ]
        gated = "auto" if self._repository(kind, name).gated else False
        about = {"id": name, "sha": commit, "private": False, "gated": gated, "downloads": 0}
        return self._json({**about, "tags": [], "siblings": siblings})

    def _resolve(self, kind: str, name: str, revision: str, path: str) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._repository(kind, name).gated and token != TOKEN:
            said = {"X-Error-Message": f"Access to {name} is restricted"}
            raise _RefusedError(403 if token else 401, "GatedRepo", **said)
        commit, files = self._files(kind, name, revision)
        known = {"X-Repo-Commit": commit}
        if (content := files.get(path)) is None:
            raise _RefusedError(404, "EntryNotFound", **known)
        if len(content) < LARGE_BYTES:
            return self._answer(200, content, **known, ETag=f'"{_sha1(content)}"')
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        linked = {"X-Linked-Size": str(len(content)), "X-Linked-ETag": etag, "ETag": etag}
        where = f"{self.hub.store}/store/{kind}/{name}/{commit}/{path}"
        return self._answer(302, b"", **known, **linked, Location=where)

    def _stored(self, content: bytes) -> None:
        asked = self.headers.get("Range", "")
        first = int(asked.removeprefix("bytes=").partition("-")[0] or 0)
        span = f"bytes {first}-{len(content) - 1}/{len(content)}"
        headers = {"Accept-Ranges": "bytes"} | ({"Content-Range": span} if asked else {})
        name = urlsplit(self.path).path.rpartition("/")[2]
        cuts = self.hub.cuts.get(name) if self.command == "GET" else None
        self._cut = cuts.pop(0) if cuts else None
        self._answer(206 if asked else 200, content[first:], **headers)

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        path, asked = urlsplit(self.path).path, self.headers.get("Range", "")
        self.hub.asked.append(Asked(self.command, path, asked, status))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: self._cut])
            self.close_connection = self.close_connection or self._cut is not None

    def log_message(self, *_: object) -> None:
        """Quiet."""


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(content), "oid": _sha1(content)}
    stored = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry | ({"lfs": stored} if len(content) >= LARGE_BYTES else {})


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
