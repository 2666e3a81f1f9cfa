"""A stand-in for the Hugging Face hub on a local socket: a few repositories, and the ways a request can fail."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40


class HubServer:
    """``repositories`` maps repository -> file -> content; ``requests`` records what was asked for."""

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        self.repositories = repositories
        self.gated: set[str] = set()
        self.truncated: set[str] = set()
        """Files (repository/file) whose bodies end before the announced length."""
        self.requests: list[str] = []
        self.url = ""

    @contextmanager
    def running(self) -> Iterator[HubServer]:
        hub = self

        class Handler(_Handler):
            server_hub = hub

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_hub: HubServer

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test output clean."""

    def _answer(self) -> None:
        hub, path = self.server_hub, self.path.partition("?")[0]
        hub.requests.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if is_api else parts[:2])
        if repo in hub.gated:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif repo not in hub.repositories:
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif is_api and "tree" in parts:
            self._send(200, json.dumps(self._tree(hub.repositories[repo])).encode())
        elif is_api:
            siblings = [{"rfilename": name} for name in hub.repositories[repo]]
            self._send(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())
        else:
            self._file(hub, repo, "/".join(parts[4:]))

    def _tree(self, files: Mapping[str, bytes]) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in files.items()
        ]

    def _file(self, hub: HubServer, repo: str, name: str) -> None:
        files = hub.repositories[repo]
        if name not in files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"', "X-Repo-Commit": COMMIT}
        self._send(200, files[name], headers, truncate=f"{repo}/{name}" in hub.truncated)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None, truncate: bool = False) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if truncate else body)
