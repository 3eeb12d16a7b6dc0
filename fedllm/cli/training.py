"""The commands that train: run, tune, sweep and suite.

Each reads and checks its recipes first, in every process that a launcher started, and imports torch after that.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fedllm.cli.options import add_command, add_overrides, add_recipe, grid_keys, importing, one_speaks, recipe_keys
from fedllm.common.errors import RunError, UserError
from fedllm.config.shipped_recipes import RECIPES, find_recipe, find_recipes_folder, require_own
from fedllm.sweeps.paper_tables import TABLES

if TYPE_CHECKING:
    from fedllm.cli.options import Commands


def add_commands(commands: Commands) -> None:
    """Adds run, tune, sweep and suite."""
    run = add_command(commands, "run", _run, "run a recipe", recipe_keys, resumes=True)
    add_recipe(run)
    run.add_argument("--dry-run", action="store_true", help="check everything up to the first step and print the plan")
    run.add_argument("--profile", action="store_true", help="measure where the rounds' time goes and print it")

    what = "measure how many clients to train together and in how many slices, and write the best into the recipe"
    tune = add_command(commands, "tune", _tune, what, recipe_keys)
    add_recipe(tune)
    tune.add_argument("--dry-run", action="store_true", help="print only; the recipe stays as it is")

    what = "run a grid of settings and seeds over a recipe"
    sweep = add_command(commands, "sweep", _sweep, what, grid_keys, resumes=True)
    sweep.add_argument("recipe", type=find_recipe, help="a recipe's YAML file")
    sweep.add_argument("grid", type=find_recipe, help="a grid's YAML file")
    add_overrides(sweep, "on top of every cell")
    sweep.add_argument("--out", type=Path, help="folder of the runs; default runs/<recipe>-<grid>")
    sweep.add_argument("--only", action="append", default=[], metavar="CASE", help="this case only; may be repeated")
    sweep.add_argument("--dry-run", action="store_true", help="check every cell, and list what each resolves to")

    what = "run the tasks of one algorithm, or a paper's whole table of methods and tasks, to one table of results"
    suite = add_command(commands, "suite", _suite, what, resumes=True)
    suite.add_argument(
        "name", choices=["glue", "20news", *TABLES], help="the tasks, or the table to set beside the paper's"
    )
    add_overrides(suite, "for every run")
    suite.add_argument("--model", help="the recipes <task>_MODEL.yaml; default: the paper's model, or else minilm")
    suite.add_argument(
        "--algorithm",
        action="append",
        default=[],
        help="default: the recipes' own; of a table all its methods, and the option may be repeated",
    )
    suite.add_argument("--task", action="append", default=[], help="of a table: this task only; may be repeated")
    suite.add_argument("--seeds", help="of a table: run.seed of every cell, such as 0,1,2; default: the recipes' own")
    suite.add_argument(
        "--small", action="store_true", help="of a table: a small model and a federation for two CPU cores"
    )
    suite.add_argument(
        "--recipes", type=Path, default=RECIPES, help="folder of the recipes (default recipes, or the installed ones)"
    )
    suite.add_argument("--out", type=Path, default=Path("runs"), help="folder of the runs and the table (default runs)")
    suite.add_argument("--beside", type=Path, metavar="CSV", help="scores for a column of their own: a scores.csv")


def _run(arguments: argparse.Namespace) -> int:
    from fedllm.config.recipe import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    with importing():
        from fedllm.experiment.run import dry_run, run

    if arguments.dry_run:
        dry_run(recipe)
    else:
        run(recipe, profile=arguments.profile)
    return 0


def _tune(arguments: argparse.Namespace) -> int:
    from fedllm.config.recipe import load_recipe

    if not arguments.dry_run:
        require_own(arguments.recipe, "fedllm tune")
    load_recipe(arguments.recipe, arguments.overrides)
    with importing():
        from fedllm.experiment.tune import tune

    tune(Path(arguments.recipe), arguments.overrides, dry_run=arguments.dry_run)
    return 0


def _sweep(arguments: argparse.Namespace) -> int:
    from fedllm.sweeps.sweep_plan import plan_sweep

    plan = plan_sweep(arguments.recipe, arguments.grid, arguments.out, arguments.overrides, arguments.only)
    if arguments.dry_run:
        from fedllm.sweeps.cell_list import list_cells

        with one_speaks():
            list_cells(plan)
        return 0
    with importing():
        from fedllm.sweeps.sweep import run_sweep

    run_sweep(plan)
    return 0


def _suite(arguments: argparse.Namespace) -> int:
    arguments.recipes = find_recipes_folder(arguments.recipes)
    if arguments.name in TABLES:
        return _table(arguments)
    from fedllm.sweeps.suite_plan import plan_suite

    only_table = {"--task": arguments.task, "--seeds": arguments.seeds, "--small": arguments.small}
    if given := [option for option, value in only_table.items() if value]:
        raise UserError(f"suite {arguments.name}: {given[0]} is for a paper's table: {', '.join(TABLES)}")
    if len(arguments.algorithm) > 1:
        raise UserError(f"suite {arguments.name}: found --algorithm {len(arguments.algorithm)} times, expected one")
    algorithm = next(iter(arguments.algorithm), None)
    chosen = (arguments.name, arguments.model, algorithm, arguments.overrides)
    plan_suite(*chosen, recipes=arguments.recipes)
    with importing():
        from fedllm.sweeps.paper_suite import run_suite

    if not run_suite(*chosen, recipes=arguments.recipes, out=arguments.out, beside=arguments.beside):
        raise RunError("not every task could be run; see above")
    return 0


def _table(arguments: argparse.Namespace) -> int:
    from fedllm.sweeps.table_plan import parse_seeds, plan_table, small_model

    if arguments.beside:
        raise UserError(f"suite {arguments.name}: --beside is for one algorithm; the paper's numbers are in this table")
    plan = plan_table(
        arguments.name,
        small_model(TABLES[arguments.name], arguments.small, arguments.model),
        arguments.algorithm,
        arguments.task,
        parse_seeds(arguments.seeds) if arguments.seeds else (),
        arguments.overrides,
        recipes=arguments.recipes,
        out=arguments.out,
    )
    with importing():
        from fedllm.sweeps.table_suite import run_table

    if not run_table(plan):
        raise RunError("not every run of the table could be made; see above")
    return 0
