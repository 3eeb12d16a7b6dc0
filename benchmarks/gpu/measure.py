"""Everything to measure on one GPU, the most important first: tests, speed, profile, stacked clients, ablation.

python -m benchmarks.gpu.measure OUT                                  # about 20 minutes; no hub and no network
python -m benchmarks.gpu.measure OUT --parts tests,speed --minutes 9  # parts whose names begin so, within 9 minutes
python -m benchmarks.gpu.measure OUT --small run.device=cpu           # a small version, to try it without a GPU

The bases are GPT-2 124M and RoBERTa-base with random weights. The texts are random words, as long as those of SST-2.
Each part is a process of its own with a time limit of its own, and does not depend on the other parts. OUT/results.json
has the result of each part and is written after every part; OUT/log.txt has their output.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from transformers.models.auto import CONFIG_MAPPING

from fedllm.common.files import replace_text

REPOSITORY = Path(__file__).resolve().parents[2]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
BASES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 50257},
    "roberta": {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
}
SMALL = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "roberta": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256},
}


@dataclass(frozen=True)
class Part:
    """A command and its time limit in seconds. found: the JSON file it writes, relative to the folder it runs in."""

    name: str
    command: list[str]
    seconds: int
    found: str | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for every part but the tests")
    parser.add_argument(
        "--parts", default="", help="names of parts or their beginnings, separated by commas; default: all"
    )
    parser.add_argument("--minutes", type=float, default=28.0, help="time limit of all parts together")
    parser.add_argument("--small", action="store_true", help="tiny bases, few clients, few repeats")
    arguments = parser.parse_intermixed_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * arguments.minutes
    results: dict[str, Any] = {"machine": machine(), "small": arguments.small, "parts": {}}
    with tempfile.TemporaryDirectory() as folder, (arguments.out / "log.txt").open("w") as log:
        recipes = {name: write_recipe(Path(folder), name, arguments.small) for name in BASES}
        for part in parts(recipes, arguments.overrides, arguments.small):
            if part.name.startswith(tuple(arguments.parts.split(","))):
                results["parts"][part.name] = attempt(part, Path(folder), until - time.monotonic(), log.fileno())
                replace_text(arguments.out / "results.json", json.dumps(results, indent=1) + "\n")
    return 0


def parts(recipes: dict[str, Path], overrides: list[str], small: bool) -> list[Part]:
    """The parts, the most important first."""
    clients, batches, repeats = (3, (2, 4), 2) if small else (10, (16, 32), 5)
    rounds = 2 if small else 12
    python = [sys.executable, "-u"]

    def speed(kind: str, base: str, batch: int, *options: str, seconds: int = 150, most: int = clients) -> Part:
        name = f"{kind}-{base}-{batch}"
        size = ["--clients", str(most), "--batch", str(batch), "--repeats", str(repeats), "--out", f"{name}.json"]
        script = ["-m", "benchmarks.speed.measure", str(recipes[base]), *size, *options, *overrides]
        return Part(name, [*python, *script], seconds, f"{name}.json")

    def profile(name: str, base: str, *settings: str) -> Part:
        run = ["-m", "fedllm", "run", str(recipes[base]), "--profile", f"run.dir={name}"]
        federation = [f"federation={{rounds: {rounds}, clients_per_round: {clients}}}", *settings]
        return Part(name, [*python, *run, *federation, *overrides], 150, f"{name}/profile.json")

    file = REPOSITORY / "tests" / "end_to_end" / "test_gpu.py"
    tests = [*python, "-m", "pytest", str(file), "-rs", "--durations=10"]
    first, second = batches
    more = 6 if small else 40
    sizes = "1,2,3" if small else "1,2,5,10,20,40"
    return [
        Part("tests", tests, 400),
        speed("speed", "gpt2", first),
        speed("speed", "roberta", first),
        profile("profile-gpt2", "gpt2"),
        speed("stacked", "gpt2", first, "--stacked-clients", sizes, most=more),
        speed("ablation", "gpt2", first, "--ablate"),
        speed("speed", "gpt2", second),
        speed("speed", "roberta", second),
        profile("profile-roberta-dropout", "roberta", "model.dropout=null", "lora.dropout=0.1"),
        speed("compile", "gpt2", first, "--ablate", "--compile", seconds=300),
        speed("stacked", "roberta", second, "--stacked-clients", sizes, most=more),
        speed("ablation", "roberta", first, "--ablate"),
        speed("stacked", "gpt2", second, "--stacked-clients", sizes, most=more),
        speed("compile", "roberta", first, "--ablate", "--compile", seconds=300),
    ]


def attempt(part: Part, folder: Path, left: float, log: int) -> dict[str, Any]:
    """Runs a part within its time limit and the `left` seconds; returns its status, seconds and JSON result."""
    limit = min(part.seconds, left)
    if limit < 20:
        return {"status": "no time left"}
    os.write(log, f"\n===== {part.name}: {' '.join(part.command)}\n".encode())
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    try:
        code = subprocess.run(
            part.command, cwd=folder, env=environment, stdout=log, stderr=log, timeout=limit, check=False
        ).returncode
        status = "done" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        status = f"stopped after {limit:.0f} s"
    took = round(time.monotonic() - began, 1)
    print(f"{part.name}: {status}, {took} s", flush=True)
    path = folder / (part.found or "")
    found = json.loads(path.read_text()) if path.is_file() else None
    return {"status": status, "seconds": took, "found": found}


def write_recipe(folder: Path, base: str, small: bool) -> Path:
    """Writes a recipe, its random texts and its base with random weights into `folder`; rounds as for SST-2."""
    model = folder / base
    settings = {**BASES[base], **(SMALL[base] if small else {})}
    write_tokenizer(model, settings["vocab_size"], pad=base == "roberta")
    pad = {"pad_token_id": SPECIAL.index("<pad>")} if base == "roberta" else {}
    CONFIG_MAPPING[base](**settings, **pad, bos_token_id=0, eos_token_id=2).save_pretrained(model)
    rows = {"train": 2000 if small else 16000, "validation": 200 if small else 872}
    for seed, (split, count) in enumerate(rows.items()):
        if not (folder / f"{split}.csv").is_file():
            write_texts(folder / f"{split}.csv", count, seed)
    recipe = {
        "model": {"name": str(model), "pretrained": False, "dropout": 0.0},
        "lora": {"rank": 16, "alpha": 32},
        "data": {split: str(folder / f"{split}.csv") for split in rows} | {"text": ["text"], "max_length": 128},
        "partition": {"scheme": "iid", "clients": 20 if small else 80},
        "algorithm": {"name": "fadamgc", "lr": 5.0e-4},
        "local": {"steps": 10, "batch_size": 4 if small else 16},
        "eval": {"every": 6},
    }
    path = folder / f"{base}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def write_tokenizer(folder: Path, size: int, pad: bool) -> None:
    """A tokenizer of `size` invented words, with a pad token or, like GPT-2's, without."""
    words = [*SPECIAL, *(f"w{number}" for number in range(size - len(SPECIAL)))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | ({"pad_token": "<pad>"} if pad else {})
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", "attention_mask"], **special
    ).save_pretrained(folder)


def write_texts(path: Path, count: int, seed: int) -> None:
    """Random words under two labels: 13 tokens per text on average and 66 at most, about as in SST-2."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(2.25, 0.8, count).round().clip(2, 66).astype(int)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for row, length in enumerate(lengths):
            writer.writerow([" ".join(f"w{word}" for word in rng.integers(50000, size=length)), row % 2])


def machine() -> dict[str, Any]:
    """The machine of the measurement."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "gpu": gpu and {"name": gpu.name, "gib": round(gpu.total_memory / 2**30, 1)},
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


if __name__ == "__main__":
    sys.exit(main())
