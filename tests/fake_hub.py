"""A local fake Hugging Face Hub: the endpoints for listing and reading data sets, and one model's name.

Clients take its address from HF_ENDPOINT as they are imported. Where they are imported already, `settings_for` says
what to set.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

ADDRESS = "http://127.0.0.1"
PAUSE_SECONDS = 0.01
"""Between looks whether the server is to end: a test waits for it."""
LARGE = (".parquet", ".safetensors", ".gz", ".zst")
"""What the hub keeps as large files, which it sends from another address."""
OF_DATA_SET = re.compile(
    r"(?:/api)?/datasets/(?P<name>[^/]+/[^/]+)(?:/(?P<verb>[^/]+)/(?P<commit>[^/]+)/?(?P<path>.*))?"
)


@dataclass
class Hub:
    """What the server holds, and how it is to answer. Serves from `with` on to its end."""

    data_sets: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    """Of each the files of every commit, the latest last."""
    objects: dict[str, bytes] = field(default_factory=dict)
    drops: int = 0
    """Of how many more answers with a file's bytes half is sent, before the connection ends."""
    asked: list[str] = field(default_factory=list)
    """Method and path of each request."""
    endpoint: str = ""

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"{ADDRESS}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(PAUSE_SECONDS,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def publish(self, name: str, files: Mapping[str, bytes]) -> str:
        """A new commit of the data set `name`, which has these files."""
        told = json.dumps([name, *((path, hashlib.sha1(content).hexdigest()) for path, content in files.items())])
        commit = hashlib.sha1(told.encode()).hexdigest()
        self.data_sets.setdefault(name, {})[commit] = dict(files)
        return commit


def settings_for(endpoint: str, cache: Path) -> list[tuple[ModuleType, str, Any]]:
    """What clients in this process must have set to ask this hub alone: module, name and value."""
    import datasets
    from huggingface_hub import constants

    return [
        (constants, "ENDPOINT", endpoint),
        (constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"),
        (constants, "HF_HUB_OFFLINE", False),
        (constants, "HF_HUB_DISABLE_XET", True),
        (constants, "HF_HOME", str(cache)),
        (constants, "HF_HUB_CACHE", str(cache / "hub")),
        (constants, "AGENT_HARNESSES_PATH", str(cache / "harnesses.json")),
        (datasets.config, "HF_ENDPOINT", endpoint),
        (datasets.config, "HF_HUB_OFFLINE", False),
        (datasets.config, "HF_DATASETS_CACHE", cache / "datasets"),
    ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or a body waits 40 ms for the client to acknowledge its headers
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, content: Any, code: int = 200, **headers: str) -> None:
        body = json.dumps(content).encode() if code != 302 else b""
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def missing(self, code: str) -> None:
        self.answer({"error": f"{code}: {self.path}"}, 404, X_Error_Code=code, X_Error_Message=code)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        path = unquote(urlsplit(self.path).path)
        if path == "/api/models/org/base":
            self.answer({"id": "org/base", "tags": [], "siblings": []})
        elif path.startswith("/objects/"):
            self.send_bytes(self.hub.objects[path.rpartition("/")[2]])
        elif found := OF_DATA_SET.fullmatch(path):
            self.of_data_set(**found.groupdict())
        else:
            self.missing("RepoNotFound")

    def of_data_set(self, name: str, verb: str | None, commit: str | None, path: str | None) -> None:
        commits = self.hub.data_sets.get(name)
        if commits is None:
            return self.missing("RepoNotFound")
        commit = [*commits][-1] if commit in (None, "main") else commit
        if commit not in commits:
            return self.missing("RevisionNotFound")
        files = commits[commit]
        if verb in (None, "revision"):
            siblings = [{"rfilename": each} for each in files]
            told = {"id": name, "sha": commit, "private": False, "gated": False, "tags": [], "siblings": siblings}
            return self.answer({"_id": "0", "lastModified": "2026-01-01T00:00:00.000Z", "cardData": {}, **told})
        if verb == "tree":
            return self.tree(files, path or "")
        if verb == "resolve" and path in files:
            return self.resolve(files[path], path, commit)
        return self.missing("EntryNotFound")

    def tree(self, files: Mapping[str, bytes], under: str) -> None:
        prefix = f"{under}/" if under else ""
        below = {path: content for path, content in files.items() if path.startswith(prefix)}
        if under and not below:
            return self.missing("EntryNotFound")
        deep = "recursive=True" in self.path or "recursive=true" in self.path
        folders = {path[: at.start()] for path in below for at in re.finditer("/", path) if at.start() >= len(prefix)}
        shown = [path for path in [*folders, *below] if deep or "/" not in path.removeprefix(prefix)]
        return self.answer([_described(path, below.get(path)) for path in sorted(shown)])

    def resolve(self, content: bytes, path: str, commit: str) -> None:
        told = {"X_Repo_Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        if not path.endswith(LARGE):
            return self.send_bytes(content, **told)
        digest = hashlib.sha256(content).hexdigest()
        self.hub.objects[digest] = content
        told |= {"X_Linked_ETag": f'"{digest}"', "X_Linked_Size": str(len(content))}
        return self.answer(None, 302, Location=f"{self.hub.endpoint}/objects/{digest}", **told)

    def send_bytes(self, content: bytes, **headers: str) -> None:
        """The content, or the range of it that was asked for."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        begin, end = (int(asked[1]), int(asked[2] or len(content) - 1) + 1) if asked else (0, len(content))
        part = content[begin:end]
        if asked and not part:
            return self.answer(None, 416)
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{begin + len(part) - 1}/{len(content)}")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if self.command == "HEAD":
            return None
        if self.hub.drops > 0:
            self.hub.drops -= 1
            self.close_connection = True
            part = part[: len(part) // 2]
        self.wfile.write(part)
        return None

    def do_POST(self) -> None:
        body = self.body()
        self.hub.asked.append(f"POST {self.path}")
        if found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/paths-info/([^/]+)", unquote(self.path)):
            self.paths_info(*found.groups(), body)
        else:
            self.answer({"error": self.path}, 404)

    def paths_info(self, name: str, commit: str, body: bytes) -> None:
        commits = self.hub.data_sets.get(name)
        if commits is None:
            return self.missing("RepoNotFound")
        files = commits.get([*commits][-1] if commit == "main" else commit)
        if files is None:
            return self.missing("RevisionNotFound")
        paths = json.loads(body)["paths"] if body.startswith(b"{") else []
        held = [path for path in paths if path in files or any(each.startswith(f"{path}/") for each in files)]
        return self.answer([_described(path, files.get(path)) for path in held])


def _described(path: str, content: bytes | None) -> dict[str, Any]:
    """A file of a tree, or a folder, which has no content."""
    oid = hashlib.sha1((path if content is None else content.hex()).encode()).hexdigest()
    if content is None:
        return {"type": "directory", "path": path, "oid": oid, "size": 0}
    found: dict[str, Any] = {"type": "file", "path": path, "oid": oid, "size": len(content)}
    if path.endswith(LARGE):
        digest = hashlib.sha256(content).hexdigest()
        found["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return found
