"""Uploads to a Hub of the test's own: an HTTP server on this machine that answers as the Hub does."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from repository import REPO

from fedllm import UserError
from fedllm.cli.commands import main
from fedllm.experiment.push import folder_to_push
from fedllm.results.names import NO_LICENCE


@dataclass
class Hub:
    """refuses: the status of every answer, 0 to take uploads. tokens: those sent. files: what was uploaded."""

    address: str = ""
    refuses: int = 0
    tokens: set[str | None] = field(default_factory=set)
    created: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        if self.refuses:
            return self.refuses, {"error": "no right to write"}
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return 200, {"url": f"{self.address}/me/mine"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/models/me/mine/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            return 200, {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        if path == "/api/models/me/mine/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return 200, {"commitUrl": f"{self.address}/me/mine/commit/1", "commitOid": "1" * 40}
        return 404, {"error": f"not in this test: {path}"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found.tokens.add(self.headers.get("Authorization"))
            self.reply(*found.answer(self.path.partition("?")[0], body))

        def do_GET(self) -> None:
            self.reply(*found.answer(self.path, b""))

        def reply(self, code: int, content: Any) -> None:
            text = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield found
    server.shutdown()
    server.server_close()


FILES = {
    "adapter_config.json": b'{"base_model_name_or_path": "org/base"}',
    "adapter_model.safetensors": bytes(range(256)),
    "README.md": b"---\nlibrary_name: peft\n---\n# mine\n",
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder, as far as an upload reads it."""
    folder = tmp_path / "run"
    (folder / "adapter").mkdir(parents=True)
    (folder / "recipe.yaml").write_text("{}")
    for name, content in FILES.items():
        (folder / "adapter" / name).write_bytes(content)
    return folder


def push(address: str, *words: object, token: str = "hf_secret", **more: str) -> tuple[int, str]:
    """Exit code and output, in a process of its own: huggingface_hub reads its environment once."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": address,
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": token,
        "NO_PROXY": "*",
        **more,
    }
    done = subprocess.run(
        [sys.executable, "-m", "fedllm", "push", *map(str, words)], cwd=REPO, capture_output=True, text=True,
        timeout=120, env=environment,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def test_the_adapter_folder_arrives_as_it_is(hub: Hub, run: Path) -> None:
    code, said = push(hub.address, run, "me/mine", "--private")
    assert code == 0, said
    assert hub.files == FILES
    assert hub.tokens == {"Bearer hf_secret"}
    assert [(made["name"], made["organization"]) for made in hub.created] == [("mine", "me")]
    assert hub.created[0].get("private") is True or hub.created[0].get("visibility") == "private"
    assert f"uploaded to {hub.address}/me/mine" in said
    assert "hf_secret" not in said
    assert "licence" not in said


def test_what_others_lack_is_told(hub: Hub, run: Path) -> None:
    config = run / "adapter" / "adapter_config.json"
    config.write_text('{"base_model_name_or_path": "/data/base"}')
    (run / "adapter" / "README.md").write_text(f"---\n{NO_LICENCE}\n---\n")
    code, said = push(hub.address, run / "adapter", "me/mine")
    assert code == 0, said
    assert "names its base by the path /data/base, which nobody else has" in said
    assert "README.md names no licence yet" in said
    assert hub.files.keys() == FILES.keys()


@pytest.mark.parametrize(("status", "code"), [(401, 2), (403, 2), (500, 1)])
@pytest.mark.slow
def test_a_hub_that_refuses(hub: Hub, run: Path, status: int, code: int) -> None:
    hub.refuses = status
    found, said = push(hub.address, run, "me/mine")
    assert found == code, said
    assert str(status) in said
    assert ("use a token that may write there" in said) == (code == 2)


@pytest.mark.slow
def test_no_network(run: Path) -> None:
    code, said = push("http://127.0.0.1:9", run, "me/mine")
    assert code == 1
    assert "http://127.0.0.1:9 cannot be reached: " in said
    code, said = push("http://127.0.0.1:9", run, "me/mine", HF_HUB_OFFLINE="1")
    assert code == 1
    assert "cannot be reached: " in said


@pytest.mark.slow
def test_no_token_and_no_name(hub: Hub, run: Path, tmp_path: Path) -> None:
    code, said = push(hub.address, run, "me/mine", token="", HF_HOME=str(tmp_path / "home"))
    assert (code, hub.created) == (2, [])
    assert "there is none; run hf auth login, or set HF_TOKEN" in said
    code, said = push(hub.address, run, "me/mine/too")
    assert code == 2
    assert "me/mine/too: is no name on the Hub, expected owner/name" in said


def test_what_is_no_finished_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(tmp_path / "none"), "me/mine"]) == 2
    assert "none: no such folder" in capsys.readouterr().err
    assert folder_to_push(run) == run / "adapter"
    (run / "adapter" / "adapter_config.json").unlink()
    with pytest.raises(UserError, match=r"has no adapter yet, .* write one first: fedllm export"):
        folder_to_push(run)
