"""A Hub on 127.0.0.1: as much of its HTTP interface as huggingface_hub uses to fetch and to publish a checkpoint."""

import base64
import contextlib
import dataclasses
import functools
import hashlib
import json
import re
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants


@dataclasses.dataclass
class Repository:
    commits: dict = dataclasses.field(default_factory=dict)  # {commit: {file name: bytes}}
    branches: dict = dataclasses.field(default_factory=dict)  # {branch: commit}
    token: str | None = None  # needed to read files, if there is one
    gated: bool = False  # whether everything but the files can be seen without the token
    private: bool | None = None
    messages: list = dataclasses.field(default_factory=list)

    def commit(self, files, branch="main"):
        """Adds a commit that holds exactly `files`; returns its hash."""
        name = hashlib.sha1(f"{len(self.commits)} {branch} {sorted(files)}".encode()).hexdigest()
        self.commits[name] = dict(files)
        self.branches[branch] = name
        return name

    def find(self, revision):
        return self.branches.get(revision, revision if revision in self.commits else None)


SMALL = {
    "config.json": b'{"model_type": "qwen2"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b"tokens",
    "tokenizer_config.json": b"settings",
    "vocab.json": b"words",
    "merges.txt": b"pairs",
    "chat_template.jinja": b"{{ messages }}",
}
CLUTTER = {
    "README.md": b"text",
    "pytorch_model.bin": b"pickle",
    "model.fp16.safetensors": b"a variant",
    "consolidated.safetensors": b"a duplicate",
    "original/config.json": b"other",
    "original/model.safetensors": b"other",
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}}).encode()
SINGLE = {**SMALL, **CLUTTER, "model.safetensors": b"weights"}
SHARDED = {
    **SMALL,
    **CLUTTER,
    "model.safetensors.index.json": INDEX,
    SHARDS[0]: b"first",
    SHARDS[1]: b"second",
    "model-00001-of-00003.safetensors": b"left over",
}


class FakeHub:
    """Serves `repositories`; records each request in `requests` as "METHOD path"."""

    def __init__(self):
        self.repositories = {}
        self.requests = []
        self.ranges = []  # Range headers of the files asked for
        self.broken = {}  # {file name: bytes after which the connection breaks, once; -1: always an error}
        self.write_token = "hf_write"
        self.connections = []
        self.refusal = None  # status with which every request is refused
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        self._server.shutdown()
        self._server.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)

    def add(self, repo_id, files, **settings):
        """A repository with one commit on its main branch."""
        self.repositories[repo_id] = Repository(**settings)
        self.repositories[repo_id].commit(files)
        return self.repositories[repo_id]

    def fetched(self):
        """Names of the files that were sent, in alphabetical order, repetitions included."""
        return sorted(line.split("/")[-1] for line in self.requests if re.match("GET .*/resolve/", line))


def serve(tmp_path, monkeypatch):
    """The body of a fixture: a fake Hub, an empty cache, no token, whatever the environment said on import."""
    with FakeHub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)  # it asks the server for more
        for name in ("HF_TOKEN_PATH", "HF_STORED_TOKENS_PATH"):
            monkeypatch.setattr(constants, name, str(tmp_path / "no_token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
            monkeypatch.delenv(name, raising=False)
        _session_without_proxy()
        yield server


@functools.cache
def _session_without_proxy():
    # Once for all tests: huggingface_hub's session takes a while to make, and looks for proxies only then.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        huggingface_hub.close_session()
        huggingface_hub.get_session()


def names(folder):
    """What lies in a folder."""
    return sorted(path.name for path in folder.iterdir())


class _Server(ThreadingHTTPServer):
    request_queue_size = 32  # huggingface_hub opens eight connections at once

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), OSError):  # the client may hang up, or `stop` did
            super().handle_error(request, client_address)


class _Error(Exception):
    """Answered with a status and the Hub's code for it."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: FakeHub

    def setup(self):
        super().setup()
        self.hub.connections.append(self.connection)

    def do_HEAD(self):
        self._answer(self._get)

    def do_GET(self):
        self._answer(self._get)

    def do_POST(self):
        self._answer(self._post)

    def log_message(self, *_):
        pass

    def _answer(self, method):
        path = urlsplit(self.path).path  # still quoted: a branch's name may have a slash in it
        self.hub.requests.append(f"{self.command} {unquote(path)}")
        try:
            if self.hub.refusal:
                raise _Error(self.hub.refusal, "Refused")
            method(path)
        except _Error as error:
            status, code = error.args
            self._send(b"", status, {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, content, status=200, headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _send_json(self, value):
        self._send(json.dumps(value).encode(), headers={"Content-Type": "application/json"})

    def _token(self):
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _commit(self, repo_id, revision):
        repository = self.hub.repositories.get(repo_id)
        if repository is None or (repository.token not in (None, self._token()) and not repository.gated):
            raise _Error(404 if self._token() else 401, "RepoNotFound")
        commit = repository.find(revision)
        if commit is None:
            raise _Error(404, "RevisionNotFound")
        return repository, commit

    def _get(self, path):
        if match := re.fullmatch(r"/api/models/(.+)/tree/([^/]+)/?", path):
            repository, commit = self._commit(*map(unquote, match.groups()))
            files = repository.commits[commit].items()
            self._send_json([{"type": "file", "path": n, "size": len(c), "oid": _blob_id(c)} for n, c in files])
        elif match := re.fullmatch(r"/api/models/(.+?)(?:/revision/([^/]+))?", path):
            repository, commit = self._commit(unquote(match[1]), unquote(match[2] or "main"))
            siblings = [{"rfilename": name} for name in repository.commits[commit]]
            self._send_json({"id": match[1], "sha": commit, "siblings": siblings, "tags": [], "downloads": 0})
        elif match := re.fullmatch(r"/(.+)/resolve/([^/]+)/(.+)", path):
            self._get_file(*map(unquote, match.groups()))
        else:
            raise _Error(404, "NotFound")

    def _get_file(self, repo_id, revision, name):
        repository, commit = self._commit(repo_id, revision)
        if repository.token not in (None, self._token()):
            raise _Error(403 if self._token() else 401, "GatedRepo")
        if name not in repository.commits[commit]:
            raise _Error(404, "EntryNotFound")
        content = repository.commits[commit][name]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_blob_id(content)}"', "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            return self._send(content, headers=headers)
        if self.hub.broken.get(name) == -1:
            raise _Error(500, "Broken")
        wanted = self.headers.get("Range")
        self.hub.ranges.append(wanted)
        if wanted is not None:
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            return self._send(content[start:], 206, headers)
        if name in self.hub.broken:
            sent = self.hub.broken.pop(name)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:sent])
            self.close_connection = True
            return None
        return self._send(content, headers=headers)

    def _post(self, path):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._token() != self.hub.write_token:
            raise _Error(401, "Unauthorized")
        if path == "/api/repos/create":
            wanted = json.loads(body)
            repo_id = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            if repo_id in self.hub.repositories:
                return self._send(json.dumps({"url": f"{self.hub.address}/{repo_id}"}).encode(), 409)
            private = {"private": True, "public": False}.get(wanted.get("visibility"), wanted.get("private"))
            self.hub.add(repo_id, {".gitattributes": b""}, private=private)
            return self._send_json({"url": f"{self.hub.address}/{repo_id}"})
        match = re.fullmatch(r"/api/models/(.+)/(branch|preupload|commit)/([^/]+)", path)
        repo_id, action, revision = map(unquote, match.groups())
        if action == "branch":
            branches = self.hub.repositories[repo_id].branches
            if revision in branches:
                raise _Error(409, "Exists")
            branches[revision] = branches["main"]
            return self._send_json({})
        repository, commit = self._commit(repo_id, revision)
        if action == "preupload":
            plans = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            for plan in plans:
                if plan["path"] in repository.commits[commit]:
                    plan["oid"] = _blob_id(repository.commits[commit][plan["path"]])
            return self._send_json({"files": plans})
        files = dict(repository.commits[commit])
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                repository.messages.append(line["value"]["summary"])
            elif line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                del files[line["value"]["path"]]
        commit = repository.commit(files, revision)
        return self._send_json({"commitUrl": f"{self.hub.address}/{repo_id}/commit/{commit}", "commitOid": commit})


def _blob_id(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
