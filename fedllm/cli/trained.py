"""The commands that use a trained run: evaluate, predict, export, chat and push."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fedllm.cli.options import CommandParser, add_command, importing

if TYPE_CHECKING:
    from fedllm.cli.options import Commands


def add_commands(commands: Commands) -> None:
    """Adds evaluate, predict, export, chat and push."""
    evaluate = add_command(commands, "evaluate", _evaluate, "scores of a run's adapter, also on a file of your own")
    _add_run(evaluate)
    what = "labelled samples (CSV, JSON lines, parquet, or a folder per class); default: the run's validation split"
    evaluate.add_argument("file", nargs="?", type=Path, help=what)
    _add_text(evaluate)
    evaluate.add_argument("--label", metavar="COLUMN", help="the file's column of labels; default: the recipe's")
    evaluate.add_argument("--out", type=Path, metavar="FILE", help="also write the scores as JSON")

    what = "predict the labels of a file's texts or images with a run's model, or answer its prompts"
    predict = add_command(commands, "predict", _predict, what)
    _add_run(predict)
    predict.add_argument("file", type=Path, help="texts or images (CSV, JSON lines or parquet), or a folder of images")
    what = "file of the predictions (.csv, .tsv, .jsonl or .parquet); an existing one is replaced"
    predict.add_argument("--out", type=Path, required=True, metavar="FILE", help=what)
    _add_text(predict)
    predict.add_argument("--probabilities", action="store_true", help="also write the probability of every class")
    what = "of a language model's answer at most; default: eval.new_tokens of the recipe"
    predict.add_argument("--new-tokens", type=int, metavar="N", help=what)

    export = add_command(
        commands,
        "export",
        _export,
        "export the adapter of a run's newest checkpoint, or the model of a run that trained all weights",
    )
    export.add_argument("run", type=Path, help="run folder, finished or not")
    export.add_argument(
        "--out", type=Path, help="folder; default <run>/adapter (or model), <run>/adapter-round-N or <run>/merged"
    )
    which = export.add_mutually_exclusive_group()
    which.add_argument("--round", type=int, metavar="N", help="the checkpoint of round N instead, if it is still there")
    which.add_argument("--best", action="store_true", help="that of the best round instead, if it is still there")
    form = export.add_mutually_exclusive_group()
    what = "the whole model, the adapter merged into its base: a plain transformers folder"
    form.add_argument("--merge", action="store_true", help=what)
    what = "the adapter of a language model as a GGUF file for llama.cpp; default <run>/adapter.gguf"
    form.add_argument("--gguf", action="store_true", help=what)

    chat = add_command(commands, "chat", _chat, "talk with the language model of a run")
    _add_run(chat)
    what = "0: the likeliest token each time; above: tokens are drawn, the more freely the higher it is"
    chat.add_argument("--temperature", type=float, default=0.0, metavar="T", help=f"{what} (default 0)")
    chat.add_argument("--new-tokens", type=int, default=256, metavar="N", help="of an answer at most (default 256)")

    push = add_command(commands, "push", _push, "upload a run's adapter with its model card to the Hugging Face Hub")
    push.add_argument("run", type=Path, help="run folder, or an exported folder")
    push.add_argument("name", help="owner/name on the Hub; the repository is made if it is not there")
    push.add_argument("--private", action="store_true", help="make a new repository private")


def _add_run(parser: CommandParser) -> None:
    parser.add_argument("run", type=Path, help="run folder, finished or not")
    parser.add_argument("--round", type=int, metavar="N", help="use the checkpoint of round N; default: the newest")


def _add_text(parser: CommandParser) -> None:
    what = "the file's column of texts, twice for pairs; default: the recipe's"
    parser.add_argument("--text", action="append", metavar="COLUMN", help=what)
    what = "the file's column of images; default: the recipe's"
    parser.add_argument("--image", metavar="COLUMN", help=what)


def _evaluate(arguments: argparse.Namespace) -> int:
    from fedllm.data.table_paths import require_table, require_writable
    from fedllm.results.kept_rounds import require_rounds

    require_rounds(arguments.run, arguments.round)  # before torch is loaded
    if arguments.file is not None:
        require_table(arguments.file, folder=True)
    if arguments.out is not None:
        require_writable(arguments.out)
    with importing():
        from fedllm.experiment.evaluate_run import evaluate_run

    options = {name: getattr(arguments, name) for name in ("text", "label", "round", "image")}
    found = evaluate_run(arguments.run, arguments.file, **options)

    from fedllm.common.console import console, say
    from fedllm.common.files import replace_text

    say(str(found), "bold")
    console.print(found.table())
    if (classes := found.class_table()) is not None:
        console.print(classes)
    if arguments.out is not None:
        import json

        replace_text(arguments.out, json.dumps(found.to_json(), indent=2) + "\n")
        say(f"scores written to {arguments.out}")
    return 0


def _predict(arguments: argparse.Namespace) -> int:
    from fedllm.data.table_paths import require_new_table, require_table
    from fedllm.results.kept_rounds import require_rounds

    require_rounds(arguments.run, arguments.round)
    require_table(arguments.file, folder=True)
    require_new_table(arguments.out, arguments.file)
    from fedllm.experiment.prediction_plan import plan_prediction  # loads pyarrow

    options = {
        "text": arguments.text,
        "probabilities": arguments.probabilities,
        "round": arguments.round,
        "new_tokens": arguments.new_tokens,
        "image": arguments.image,
    }
    plan = plan_prediction(arguments.run, arguments.file, arguments.out, **options)  # before torch is loaded
    with importing():
        from fedllm.experiment.prediction import predict_planned

    from fedllm.common.console import say

    found = predict_planned(plan)
    say(f"{found.rows:,} predictions written to {found.path} (model of round {found.round})")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from fedllm.experiment.export_plan import plan_export

    which = {"round": arguments.round, "best": arguments.best}
    plan = plan_export(arguments.run, arguments.out, **which, merge=arguments.merge)  # before torch is loaded
    with importing():
        from fedllm.experiment.export import export_adapter, export_gguf, export_merged

    from fedllm.common.console import say

    if arguments.gguf:
        say(f"GGUF adapter written to {export_gguf(arguments.run, arguments.out, **which)}")
    elif arguments.merge:
        say(f"merged model written to {export_merged(arguments.run, arguments.out, **which)}")
    else:
        say(f"{plan.kind} written to {export_adapter(arguments.run, arguments.out, **which)}")
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    from fedllm.experiment.chat_plan import check_chat

    check_chat(arguments.run, arguments.round, arguments.temperature, arguments.new_tokens)  # before torch is loaded
    with importing():
        from fedllm.experiment.chat import talk

    talk(arguments.run, arguments.round, arguments.temperature, arguments.new_tokens)
    return 0


def _push(arguments: argparse.Namespace) -> int:
    from fedllm.common.console import say
    from fedllm.experiment.push import push_adapter

    say(f"uploaded to {push_adapter(arguments.run, arguments.name, private=arguments.private)}")
    return 0
