"""`fedllm site` tells of a wrong address before it loads anything."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

from fedllm.deployment.federation_folder import new_federation

_PROGRAM = """
import sys
from fedllm.cli.commands import main
code = main(["site", sys.argv[1]])
print(code, "torch" in sys.modules)
"""


def test_a_wrong_server_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        _, home = new_federation(tmp_path, ["a"], "{}", address=address, listen=address, validation=None)
        (home / "train.csv").write_text("text,label\nred,0\n")

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"220 a mail server\r\n")

        threading.Thread(target=answer, daemon=True).start()
        words = [sys.executable, "-c", _PROGRAM, str(home / "site.yaml")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["2", "False"], done.stderr
    assert f"{address}: what answers there speaks no TLS" in " ".join(done.stderr.split())
