"""A hub on loopback for ``huggingface_hub``, ``transformers`` and ``datasets``.

Large files redirect to a store. Requests are recorded, connections cut, repositories gated.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE_BYTES = 50_000
"""Files from this size on are in the store."""
TOKEN = "hf_allowed"
"""Gives access to gated repositories; any other token does not."""
PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


@dataclass
class Repository:
    """A model or a data set: its files at each commit."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    """Commits of branches and tags."""
    gated: bool = False

    def commit(self, revision: str) -> str | None:
        """Return the commit that a branch, a tag or a commit names."""
        revision = self.refs.get(revision, revision)
        return revision if revision in self.commits else None


@dataclass(frozen=True)
class Asked:
    """A request."""

    method: str
    path: str
    range: str = ""
    status: int = 200


@dataclass
class Hub:
    """What is on the hub, and what was asked of it."""

    endpoint: str
    store: str
    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    """By kind (``models``, ``datasets``) and name."""
    asked: list[Asked] = field(default_factory=list)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """By a file's name, after how many bytes its next connections are cut."""

    def add(
        self,
        kind: str,
        name: str,
        *versions: dict[str, bytes],
        gated: bool = False,
        tags: tuple[str, ...] = (),
    ) -> tuple[str, ...]:
        """Add a repository with a commit for each version, and return the commits."""
        commits = [
            hashlib.sha1(f"{name} {number}".encode(), usedforsecurity=False).hexdigest()
            for number in range(len(versions))
        ]
        refs = {**dict(zip(tags, commits, strict=False)), "main": commits[-1]}
        self.repositories[kind, name] = Repository(
            dict(zip(commits, versions, strict=True)), refs, gated
        )
        return tuple(commits)

    def downloads(self, name: str) -> list[Asked]:
        """Return the requests for the content of files whose path ends in ``name``."""
        return [
            each
            for each in self.asked
            if each.method == "GET" and each.path.endswith(f"/{name}") and each.status in (200, 206)
        ]

    def environment(self, cache: object) -> dict[str, str]:
        """Return the variables that make a process use this hub and a cache folder of its own."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }


@contextmanager
def loopback_hub() -> Iterator[Hub]:
    """Serve an empty hub, and its store on another host: clients follow redirects for content."""
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server,
        ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as store,
    ):
        hub = Hub(f"http://127.0.0.1:{server.server_port}", f"http://127.0.0.1:{store.server_port}")
        for each in (server, store):
            each.hub = hub  # type: ignore[attr-defined]
            threading.Thread(target=each.serve_forever, name="hub", daemon=True).start()
        yield hub
        for each in (server, store):
            each.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        found: Hub = self.server.hub  # type: ignore[attr-defined]
        return found

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if parts[0] == "store":
            self._stored(*parts[1:])
        elif parts[0] == "api" and len(parts) >= 4 and parts[1] in ("models", "datasets"):
            self._api(parts[1], "/".join(parts[2:4]), parts[4:])
        elif "resolve" in parts:
            kind, names = ("datasets", parts[1:]) if parts[0] == "datasets" else ("models", parts)
            self._resolve(kind, "/".join(names[:2]), names[3], "/".join(names[4:]))
        else:
            self._answer(404, b"{}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        repository = (
            self.hub.repositories.get((parts[1], "/".join(parts[2:4])))
            if len(parts) > 5 and parts[4] == "paths-info"
            else None
        )
        commit = repository.commit(parts[5]) if repository else None
        if repository is None or commit is None:
            return self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        is_json = self.headers.get("Content-Type", "").startswith("application/json")
        wanted = json.loads(body)["paths"] if is_json else parse_qs(body).get("paths", [])
        return self._json(
            [
                _entry(path, content)
                for path, content in repository.commits[commit].items()
                if path in wanted
            ]
        )

    def _api(self, kind: str, name: str, rest: list[str]) -> None:
        repository = self.hub.repositories.get((kind, name))
        if repository is None:
            missing = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            return self._answer(401, b"{}", missing)
        revision = rest[1] if len(rest) > 1 else "main"
        commit = repository.commit(revision)
        if commit is None:
            return self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files = repository.commits[commit]
        if rest[:1] == ["tree"]:
            below = "/".join(rest[2:])
            return self._json(
                [_entry(path, content) for path, content in files.items() if path.startswith(below)]
            )
        siblings = [
            {"rfilename": path, "size": len(content), "blobId": _sha1(content)}
            for path, content in files.items()
        ]
        gated = "auto" if repository.gated else False
        about = {"id": name, "sha": commit, "private": False, "gated": gated, "downloads": 0}
        return self._json({**about, "tags": [], "siblings": siblings})

    def _resolve(self, kind: str, name: str, revision: str, path: str) -> None:
        repository = self.hub.repositories.get((kind, name))
        if repository is None:
            return self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if repository.gated and (refused := self._refusal()):
            why = {
                "X-Error-Code": "GatedRepo",
                "X-Error-Message": f"Access to {name} is restricted",
            }
            return self._answer(refused, b"{}", why)
        commit = repository.commit(revision)
        if commit is None:
            return self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        content = repository.commits[commit].get(path)
        if content is None:
            missing = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
            return self._answer(404, b"{}", missing)
        if len(content) < LARGE_BYTES:
            known = {"X-Repo-Commit": commit, "ETag": f'"{_sha1(content)}"'}
            return self._answer(200, content, known)
        sha = hashlib.sha256(content).hexdigest()
        linked = {
            "X-Linked-Size": str(len(content)),
            "X-Linked-ETag": f'"{sha}"',
            "X-Repo-Commit": commit,
        }
        where = f"{self.hub.store}/store/{kind}/{name}/{commit}/{path}"
        return self._answer(302, b"", {**linked, "Location": where, "ETag": f'"{sha}"'})

    def _refusal(self) -> int:
        """Return 401 without a token, 403 with one that has no access, 0 with access."""
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return 401 if not given else 0 if given == TOKEN else 403

    def _stored(self, kind: str, owner: str, name: str, commit: str, *path: str) -> None:
        content = self.hub.repositories[kind, f"{owner}/{name}"].commits[commit]["/".join(path)]
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        whole = (
            {"Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}"}
            if "Range" in self.headers
            else {}
        )
        cuts = self.hub.cuts.get(path[-1], []) if self.command == "GET" else []
        cut = cuts.pop(0) if cuts else None
        self._answer(
            206 if whole else 200, content[first:], {**whole, "Accept-Ranges": "bytes"}, cut=cut
        )

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str] = MappingProxyType({}),
        *,
        cut: int | None = None,
    ) -> None:
        asked = Asked(self.command, urlsplit(self.path).path, self.headers.get("Range", ""), status)
        self.hub.asked.append(asked)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Quiet."""


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(content), "oid": _sha1(content)}
    stored = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry | ({"lfs": stored} if len(content) >= LARGE_BYTES else {})


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
