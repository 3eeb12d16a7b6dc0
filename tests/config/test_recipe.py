"""Recipes: every one in recipes/ parses, and every mistake is named before a model is loaded."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from repository import REPO

from fedllm import load_algorithm, load_recipe
from fedllm.common.errors import UserError
from fedllm.common.schema import keys, without_nulls
from fedllm.config.key_help import help_text
from fedllm.config.recipe import ALIASES, SECTION_TYPES, own_keys
from fedllm.models.settings import LoraSettings

RECIPES = sorted((REPO / "recipes").glob("*.yaml"))
GLUE = ("cola", "rte", "sst2", "qqp", "mrpc", "qnli", "mnli")


def test_the_recipes_are_all_here() -> None:
    families = {f"{task}_{model}" for task in GLUE for model in ("roberta", "minilm")}
    gpt2 = ("20news", "qqp", "qnli", "sst2")
    families |= {f"{task}_gpt2" for task in gpt2} | {f"{task}_gc_minilm" for task in (*gpt2, "bbcnews")}
    families |= {"20news_minilm", "bbcnews_minilm"}
    single = {"quickstart", "qqp_fadamgc", "20news_fadamgc", "shakespeare_gpt2"}
    single |= {f"sst2_{name}" for name in ("fadamgc", "fedadamw", "localadam", "localadamw")}
    images = ("cifar10", "cifar100", "tiny_imagenet")
    families |= {f"{task}_{model}" for task in images for model in ("gc_resnet18", "pt_resnet18", "gc_cnn", "cnn")}
    families |= {f"cifar100{alpha}_{model}" for alpha in ("", "_dir06") for model in ("resnet18", "vit_tiny", "cnn")}
    single |= {"cifar100_swin", "tiny_imagenet_swin", "cifar100_vit_base", "cifar10_small"}
    single |= {f"instruct_{name}" for name in ("smollm2", "flowertune", "openfedllm")}
    assert {path.stem for path in RECIPES} == families | single
    everything = {path.parent.name for path in (REPO / "recipes").rglob("*.yaml")}
    assert everything == {"recipes", "base", "sweeps"}  # bases are tested through what extends them, sweeps beside


def test_no_recipe_repeats_another() -> None:
    texts = [yaml.safe_load(path.read_text()) for path in RECIPES]
    said = [(name, repr(section)) for text in texts for name, section in text.items() if section is not None]
    repeated = {name for name, section in said if said.count((name, section)) > 1}
    assert repeated <= {"extends", "algorithm", "data", "eval", "partition"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_parses_and_its_resolved_form_reads_back_the_same(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    (tmp_path / path.name).write_text(recipe.yaml())
    assert load_recipe(tmp_path / path.name).sections() == recipe.sections()
    assert recipe.load_algorithm().lr == recipe.algorithm["lr"]


def write(folder: Path, text: str, name: str = "r.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


SMALL = "data: {name: glue/sst2}\nalgorithm: {name: fadamgc}\n"


def test_overrides_and_yamls_3e4_become_numbers(tmp_path: Path) -> None:
    overrides = ["algorithm.lr=3e-4", "federation.rounds=50", "run.seed=1", "local.steps=5", "algorithm.betas=[0.5, 0]"]
    recipe = load_recipe(write(tmp_path, SMALL), overrides)
    assert recipe.algorithm["lr"] == 3e-4
    assert (recipe.federation.rounds, recipe.run.seed, recipe.local.steps) == (50, 1, 5)
    assert recipe.algorithm["betas"] == [0.5, 0.0]


def test_extends_gives_only_what_differs(tmp_path: Path) -> None:
    write(tmp_path, SMALL + "local: {steps: 7, batch_size: 4}\n", "base.yaml")
    recipe = load_recipe(write(tmp_path, "extends: base.yaml\nlocal: {batch_size: 8}\n"))
    assert (recipe.local.steps, recipe.local.batch_size) == (7, 8)
    write(tmp_path, "extends: r.yaml\n", "base.yaml")
    with pytest.raises(UserError, match="extends itself"):
        load_recipe(tmp_path / "r.yaml")


TABLE = SMALL + "algorithms: {fedavg: {lr: 0.1, weight_decay: 0.5}, fadamgc: {lr: 0.2}, localadamw: {lr: 0.3}}\n"


def test_an_algorithm_has_the_settings_that_a_recipe_lists_for_it(tmp_path: Path) -> None:
    path = write(tmp_path, TABLE)
    assert load_recipe(path).algorithm["lr"] == 0.2
    for choice in ("algorithm=fedavg", "algorithm.name=FedAvg", "algorithm={name: fedavg}"):
        chosen = load_recipe(path, [choice])
        assert (chosen.name, chosen.algorithm["lr"], chosen.algorithm["weight_decay"]) == ("r_fedavg", 0.1, 0.5)
    assert load_recipe(path, ["algorithm=fedavg", "algorithm.lr=3"]).algorithm["lr"] == 3
    assert load_recipe(path, ["algorithm={name: fedavg, lr: 3}"]).algorithm["weight_decay"] == 0.5
    assert load_recipe(path, ["algorithm=fedit_adamw"]).algorithm["lr"] == 0.3  # an alias is the same algorithm
    unlisted = load_recipe(path, ["algorithm=fedcm"])
    assert unlisted.algorithm == load_recipe(path, ["algorithm=fedcm", "algorithms={}"]).algorithm


OWN = "data: {name: glue/sst2}\nalgorithm: {name: fadamgc, lr: 0.5, schedule: linear, tracking_init: gradient}\n"


def test_null_returns_a_key_to_its_default(tmp_path: Path) -> None:
    path = write(tmp_path, OWN + "algorithms: {fedavg: {lr: 0.3}}\nlora: {rank: 4, alpha: 7}\n")
    assert load_recipe(path, ["algorithm.lr=null"]).algorithm["lr"] == 0.001
    assert load_recipe(path, ["algorithm={name: fedavg, lr: null}"]).algorithm["lr"] == 0.1
    assert load_recipe(path, ["algorithm=fedavg", "algorithm.schedule=~"]).algorithm["schedule"] == "constant"
    assert load_recipe(path, ["lora={alpha: null}"]).lora == replace(load_recipe(path).lora, alpha=LoraSettings().alpha)
    assert load_recipe(path, ["run.cohort=null"]).run.stacked_clients == "auto"
    with pytest.raises(UserError, match="lrr: unknown key"):
        load_recipe(path, ["algorithm.lrr=null"])


def test_every_key_that_may_be_null_is_null_by_default() -> None:
    """Else null would not be its default."""
    for cls in SECTION_TYPES.values():
        values = dict.fromkeys(keys(cls))
        assert all(field.default is None for field in fields(cls) if field.name in without_nulls(cls, values))


def test_the_table_of_algorithms_can_be_extended(tmp_path: Path) -> None:
    write(tmp_path, TABLE, "base.yaml")
    path = write(tmp_path, "extends: base.yaml\nalgorithms: {fedavg: {lr: 0.7}}\n", "r_fedavg.yaml")
    chosen = load_recipe(path, ["algorithm=fedavg"])
    assert (chosen.algorithm["lr"], chosen.algorithm["weight_decay"]) == (0.7, 0.5)
    assert load_recipe(path, ["algorithm=fedavg"]).name == "r_fedavg"
    assert load_recipe(path).algorithm["lr"] == 0.2
    assert "algorithms" not in load_recipe(path).sections()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("{fedavg: {lrr: 1}}", r"algorithms.fedavg.lrr: unknown key \(did you mean 'lr'\?\)"),
        ("{fedavgg: {lr: 1}}", r"algorithms.fedavgg.name: unknown algorithm 'fedavgg' \(did you mean"),
        ("{fedavg: 0.1}", r"algorithms.fedavg: found 0.1, expected settings such as \{lr: 0.1\}"),
        ("{fedavg: {name: fedcm}}", r"algorithms.fedavg: found .* expected settings"),
        ("[fedavg]", r"algorithms: found \['fedavg'\], expected keys and values"),
    ],
)
def test_mistakes_in_the_table_of_algorithms_are_named(tmp_path: Path, table: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_recipe(write(tmp_path, f"{SMALL}algorithms: {table}\n"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm.lrr=1", r"r.yaml: algorithm.lrr: unknown key \(did you mean 'lr'\?\)"),
        ("federaton.rounds=1", r"unknown section 'federaton' \(did you mean 'federation'\?\)"),
        ("federation.round=1", r"federation.round: unknown key \(did you mean 'rounds'\?\)"),
        ("federation.rounds=many", r"federation.rounds: found 'many', expected a whole number"),
        ("federation.rounds=2.5", r"federation.rounds: found 2.5, expected a whole number"),
        ("federation.rounds=0", r"federation.rounds: found 0, expected a positive number"),
        ("model.pretrained=maybe", r"model.pretrained: found 'maybe', expected true or false"),
        ("model.dtype=float64", r"model.dtype: found 'float64', expected one of: float32, bfloat16"),
        ("algorithm.betas=[0.9, 1.0]", r"betas: beta2 is 1.0, expected a number in \[0, 1\)"),
        ("algorithm.betas=[0.9]", r"algorithm.betas: found \[0.9\], expected a list of 2 numbers"),
        ("algorithm.lr=-1", r"lr: found -1.0, expected a positive number"),
        ("algorithm.lr=.nan", r"algorithm.lr: found nan, expected a number"),
        ("algorithm.name=fadamcg", r"algorithm.name: unknown algorithm 'fadamcg' \(did you mean"),
        ("local={epochs: 1, steps: 2}", r"local.steps: found both epochs=1 and steps=2"),
        ("run.cohort=big", r"run.cohort: found 'big', expected a whole number or one of: auto"),
        ("data.name=null", r"data.name: missing"),
        (
            "data.strip=[footer]",
            r"data.strip: found \['footer'\], expected a list of any of: headers, footers, quotes or null",
        ),
        ("data.strip=none", r"data.strip: found 'none', expected a list of any of: headers, footers, quotes or null"),
        ("rounds=3", r"unknown section 'rounds' \(did you mean 'federation.rounds'\?\)"),
        ("run.seed=", r"override 'run.seed=': found no value; for the default write run.seed=null"),
        ("run={seed: }", r"override 'run=.*: the key 'seed' has no value \(line 1\)"),
        ("algorithm=''", r"r.yaml: algorithm.name: unknown algorithm ''; known: fa_nt"),
        ("algorithm.name=null", r"algorithm.name: found None, expected an algorithm"),
        ("algorithm=3", r"r.yaml: algorithm: found 3, expected keys and values \(given as the override"),
        ("run=null", r"r.yaml: run: found None, expected keys and values"),
        ("run.seed=" + 400 * "9" + ".0", r"run.seed: found inf, expected a whole number"),
        ("run.threads=100000", r"run.threads: found 100000, expected at most 1024"),
        ("algorithm.lr=2021-99-99", r"override 'algorithm.lr=2021-99-99': the value is not readable as YAML: month"),
        ("lora={rank: 1, rank: 2}", r"override 'lora=.*: the key 'rank' is there twice \(line 1\)"),
        (
            "federation={clients_per_round: 2, min_clients: 3}",
            r"min_clients: found 3, expected at most clients_per_round",
        ),
        (
            "federation={clients_per_round: null, min_clients: 11}",
            r"r.yaml: federation.min_clients: found 11, expected at most clients_per_round=10, of 100 clients",
        ),
        ("eval.target={accuracy: 80}", r"eval.target: found accuracy: 80, expected at most 1"),
        ("eval.target={perplexity: 0.5}", r"eval.target: found perplexity: 0.5, expected at least 1"),
        ("eval.target={eval_loss: -0.1}", r"eval.target: found eval_loss: -0.1, expected at least 0"),
        ("costs.seconds_per_step=0", r"costs.seconds_per_step: found 0.0, expected a positive number"),
        ("eval.stop_at_target=true", r"eval.stop_at_target: found true without a target"),
        ("federation", r"override 'federation': expected section.key=value"),
        ("federation=3", r"federation: found 3, expected keys and values"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_recipe(write(tmp_path, SMALL), [override])


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"r.yaml: not readable as YAML: the key 'algorithm' is there twice"):
        load_recipe(write(tmp_path, SMALL + "algorithm: {name: fedavg}\n"))
    merged = load_recipe(write(tmp_path, SMALL + "lora: {<<: {rank: 3, alpha: 5}, rank: 4}\n"))
    assert (merged.lora.rank, merged.lora.alpha) == (4, 5)


@pytest.mark.slow
def test_what_nests_too_deeply_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"r.yaml: not readable as YAML: it nests too deeply"):
        load_recipe(write(tmp_path, f"data: {5000 * '['}{5000 * ']'}\n"))


@pytest.mark.parametrize("seed", ["9007199254740993", "99999999999999999999999999", "'9007199254740993'", "7.0"])
def test_whole_numbers_are_taken_as_they_are(tmp_path: Path, seed: str) -> None:
    recipe = load_recipe(write(tmp_path, SMALL), [f"run.seed={seed}"])
    assert str(recipe.run.seed) == seed.strip("'").removesuffix(".0")


def test_numpys_numbers_are_numbers() -> None:
    alg = load_algorithm("fadamgc", lr=np.float32(0.5), warmup_rounds=np.int64(3))
    assert (alg.lr, alg.warmup_rounds, type(alg.warmup_rounds)) == (0.5, 3, int)


# Other names of keys


@pytest.mark.parametrize("key", ["cohort", "stacked_clients"])
def test_a_key_has_one_meaning_under_all_its_names(tmp_path: Path, key: str) -> None:
    recipes = [
        load_recipe(write(tmp_path, f"{SMALL}run: {{{key}: 3}}\n")),
        load_recipe(write(tmp_path, SMALL), [f"run.{key}=3"]),
        load_recipe(write(tmp_path, SMALL), [f"run={{{key}: 3}}"]),
    ]
    for recipe in recipes:
        assert recipe.run.stacked_clients == 3
        run = yaml.safe_load(recipe.yaml())["run"]
        assert run["stacked_clients"] == 3
        assert "cohort" not in run


@pytest.mark.parametrize(("below", "above"), [("cohort", "stacked_clients"), ("stacked_clients", "cohort")])
def test_a_layer_replaces_a_key_that_a_lower_one_gives_under_another_name(
    tmp_path: Path, below: str, above: str
) -> None:
    write(tmp_path, f"{SMALL}run: {{{below}: 3, seed: 7}}\n", "base.yaml")
    path = write(tmp_path, f"extends: base.yaml\nrun: {{{above}: 4}}\n")
    assert (load_recipe(path).run.stacked_clients, load_recipe(path).run.seed) == (4, 7)
    assert load_recipe(path, [f"run.{below}=5"]).run.stacked_clients == 5
    assert load_recipe(path, [f"run.{above}=5"]).run.stacked_clients == 5


def test_two_names_of_one_key_may_only_say_the_same(tmp_path: Path) -> None:
    said = r"r.yaml: run.cohort: found 3, but stacked_clients is 4: they are one setting; give stacked_clients alone"
    with pytest.raises(UserError, match=said):
        load_recipe(write(tmp_path, f"{SMALL}run: {{cohort: 3, stacked_clients: 4}}\n"))
    same = write(tmp_path, f"{SMALL}run: {{cohort: 3, stacked_clients: 3}}\n")
    assert load_recipe(same).run.stacked_clients == 3
    for words in (["run.cohort=3", "run.stacked_clients=4"], ["run.stacked_clients=4", "run.cohort=3"]):
        with pytest.raises(
            UserError, match=rf"override '{words[1]}': {words[0].replace('=', ' is ')} in another"
        ) as error:
            load_recipe(same, words)
        assert "give run.stacked_clients alone" in str(error.value)
    assert load_recipe(same, ["run.cohort=5", "run.stacked_clients=5"]).run.stacked_clients == 5
    assert load_recipe(same, ["run.cohort=5", "run.cohort=6"]).run.stacked_clients == 6


def test_a_mistake_is_named_by_the_name_that_was_given(tmp_path: Path) -> None:
    for key in ("cohort", "stacked_clients"):
        for value, said in (("0", "found 0, expected a positive number"), ("big", "found 'big', expected a whole")):
            with pytest.raises(UserError, match=rf"r.yaml: run.{key}: {said}.* \(given as the override"):
                load_recipe(write(tmp_path, SMALL), [f"run.{key}={value}"])


def test_no_alias_is_a_key_and_every_one_is_in_the_help() -> None:
    text = help_text()
    for (section, alias), key in ALIASES.items():
        own = keys(SECTION_TYPES[section])
        assert key in own
        assert alias not in own
        assert f"also {section}.{alias}]" in text


def test_a_section_of_an_earlier_version_has_the_keys_of_this_one() -> None:
    new = {"seed": 1, "stacked_clients": 3}
    assert own_keys("run", {"seed": 1, "cohort": 3}) == own_keys("run", new) == new
    assert own_keys("federation", {"cohort": 3}) == {"sampling": "fixed", "held_out": None, "cohort": 3}


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    write(tmp_path, SMALL, "sst2.yaml")
    with pytest.raises(UserError, match=r"no such recipe file; did you mean .*sst2.yaml"):
        load_recipe(tmp_path / "sst.yaml")
    with pytest.raises(UserError, match="not readable as YAML"):
        load_recipe(write(tmp_path, "a: [", "bad.yaml"))
    with pytest.raises(UserError, match="expected sections"):
        load_recipe(write(tmp_path, "just text", "text.yaml"))


def test_help_names_every_key() -> None:
    text = help_text()
    for section, cls in SECTION_TYPES.items():
        for key in cls.__dataclass_fields__:  # type: ignore[attr-defined]
            assert f"{section}.{key} " in text


def test_documented_keys_of_the_design_are_all_known(tmp_path: Path) -> None:
    text = """
model:      {name: openai-community/gpt2, pretrained: true, dtype: float32, quantize: none}
lora:       {rank: 16, alpha: 32, dropout: 0.0, targets: [query, value]}
data:       {name: glue/qqp, max_length: 128}
partition:  {scheme: dirichlet_classes, alpha: 0.1, clients: 100, seed: 0, min_size: 1}
algorithm:  {name: fadamgc, lr: 1.0e-4, server_lr: 0.3, betas: [0.9, 0.99]}
federation: {rounds: 300, clients_per_round: 10, tracked_per_round: 10, min_clients: 1}
local:      {epochs: 1, batch_size: 32}
eval:       {every: 1, target: {accuracy: 0.75}}
run:        {seed: 0, dir: null, cohort: auto, precision: auto, checkpoint_every: 10, resume: auto, local_hub: null}
costs:      {bandwidth_mbit: 100}
"""
    sections = load_recipe(write(tmp_path, text)).sections()
    for section, values in yaml.safe_load(text).items():
        for key, value in values.items():
            assert sections[section][ALIASES.get((section, key), key)] == value, (section, key)


# Numbers that follow from others


def test_clients_per_round_are_at_most_all_clients(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    sampled = {n: load_recipe(path, [f"partition.clients={n}"]).federation.clients_per_round for n in (3, 10, 99)}
    assert sampled == {3: 3, 10: 10, 99: 10}
    assert load_recipe(path).partition.clients == 100
    given = load_recipe(path, ["partition.clients=3", "federation.clients_per_round=4"])
    assert given.federation.clients_per_round == 4, "what does not fit stays an error"


@pytest.mark.parametrize("words", ["partition={scheme: by_column, column: site}", "partition={file: p.json}"])
def test_clients_that_only_the_data_tell_leave_them_open(tmp_path: Path, words: str) -> None:
    open_ = load_recipe(write(tmp_path, SMALL), [words])
    assert open_.partition.known_clients is None
    assert open_.federation.clients_per_round is None
    assert open_.for_clients(7).federation.clients_per_round == 7
    given = load_recipe(write(tmp_path, SMALL), [words, "federation.clients_per_round=4"])
    assert given.for_clients(7) == open_.for_clients(4)


def test_a_target_may_be_a_loss_of_any_size(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, SMALL), ["eval.target={eval_loss: 1.5}"]).eval.target == {"eval_loss": 1.5}
