"""Two hosts, emulated by Linux namespaces: addresses of their own, and the second does not see the first one's disk."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from adapters import same_bits
from launched import ENVIRONMENT, TORCHRUN, numbers

from fedllm import run_recipe

OVERRIDES = ["algorithm.tracking_init=gradient", "run.checkpoint_every=2"]


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """The names of two network namespaces with one cable between them: 10.77.0.1 and 10.77.0.2, called a<id>, b<id>."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs the commands ip and unshare")
    name = uuid.uuid4().hex[:6]
    first, second = f"a{name}", f"b{name}"
    steps = [
        f"ip netns add {first}",
        f"ip netns add {second}",
        f"ip link add {first} type veth peer name {second}",
        f"ip link set {first} netns {first}",
        f"ip link set {second} netns {second}",
        f"ip -n {first} addr add 10.77.0.1/24 dev {first}",
        f"ip -n {second} addr add 10.77.0.2/24 dev {second}",
        *(f"ip -n {host} link set {device} up" for host in (first, second) for device in (host, "lo")),
    ]
    try:
        for step in steps:
            done = subprocess.run(step.split(), capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"needs the right to make network namespaces: {done.stderr.strip()}")
        yield first, second
    finally:
        for host in (first, second):
            subprocess.run(["ip", "netns", "delete", host], capture_output=True)


@pytest.mark.slow
def test_two_hosts_that_share_no_folder_give_the_bits_of_one(
    tiny: Path, tmp_path: Path, hosts: tuple[str, str]
) -> None:
    """Clients' vectors travel to the process that trains them next, and to rank 0 for checkpoints.

    One host alone goes on from such a checkpoint.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["-m", "fedllm", "run", str(tiny / "recipe.yaml"), f"run.dir={disk / 'run'}", *OVERRIDES]
    torchrun = [
        *TORCHRUN,
        "--nnodes",
        "2",
        "--nproc_per_node",
        "1",
        "--master_addr",
        "10.77.0.1",
        "--master_port",
        "29555",
    ]
    launched = []
    for node, host in enumerate(hosts):
        environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": host}
        hide = f"mount -t tmpfs none {disk} && " if node else ""  # its own, empty disk at the same path
        shell = f'{hide}exec "$@"'
        command = ["ip", "netns", "exec", host, "unshare", "-m", "sh", "-c", shell, "sh", *torchrun]
        launched.append(
            subprocess.Popen(
                [*command, "--node_rank", str(node), *words],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    said = [process.communicate(timeout=300)[0] for process in launched]
    assert [process.returncode for process in launched] == [0, 0], said
    one = run_recipe(tiny / "recipe.yaml", [*OVERRIDES, "run.shares=2"], tmp_path / "one").folder
    assert same_bits(disk / "run", one)
    assert numbers(disk / "run") == numbers(one)

    (disk / "run" / "result.json").unlink()
    shutil.rmtree(disk / "run" / "checkpoints" / "000004")
    run_recipe(tiny / "recipe.yaml", OVERRIDES, disk / "run")
    assert same_bits(disk / "run", one)
