"""Registers the sites' public keys at a SuperLink, all in one process. Needs flwr.

Started by flower_server as `python -m fedllm.deployment.flower_control LINK NAME=FILE ...`; it prints JSON. It does
what `flwr supernode register FILE LINK --name NAME` does, without a process for each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path


def register(link: str, files: Mapping[str, Path]) -> None:
    """Registers public keys under their sites' names. A key that is registered already is no error."""
    import click
    from flwr.cli.flower_config import read_superlink_connection
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection
    from flwr.proto.control_pb2 import RegisterNodeRequest

    client = init_http_client_from_connection(read_superlink_connection(link))
    try:
        for name, file in files.items():
            request = RegisterNodeRequest(public_key=try_load_public_key(file), name=name)
            try:
                with flwr_cli_exc_handler():
                    client.RegisterNode(request)
            except click.ClickException as error:
                if "already" not in error.message:
                    raise
    finally:
        client.close()


if __name__ == "__main__":
    pairs = [argument.partition("=") for argument in sys.argv[2:]]
    try:
        register(sys.argv[1], {name: Path(file) for name, _, file in pairs})
    except Exception as error:
        print(json.dumps({"success": False, "error-message": f"{type(error).__name__}: {error}"}))
        sys.exit(1)
    print(json.dumps({"success": True}))
