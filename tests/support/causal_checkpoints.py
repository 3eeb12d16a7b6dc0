"""Tiny random causal language models of eight architectures, saved with a chat template, and a run of one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tiny_models import WORDS, save_tokenizer
from transformers import AutoModelForCausalLM
from transformers.models.auto import CONFIG_MAPPING

from fedllm import run_recipe

_SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
_GEMMA = {**_SMALL, "head_dim": 8, "sliding_window": 8}
CAUSAL = {
    "llama": {**_SMALL, "tie_word_embeddings": True},
    "mistral": {**_SMALL, "sliding_window": 8},
    "qwen2": _SMALL,
    "qwen3": {**_SMALL, "head_dim": 8},
    "gemma2": {**_GEMMA, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 4.0},
    "gemma3_text": _GEMMA,
    "phi3": {**_SMALL, "pad_token_id": 1},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 2},
}  # fmt: skip
FAMILIES = list(CAUSAL)
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} or {{ message.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant or {% endif %}"
)


def save_causal(folder: Path, family: str, *, template: str | None = TEMPLATE, **changes: object) -> str:
    """A random checkpoint of `family` in `folder`; its path. Its pad token is its eos token, </s>."""
    settings = {"vocab_size": 32, "initializer_range": 0.3, **CAUSAL[family], **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings))
    model.generation_config.repetition_penalty = 1.3  # as Qwen's has one
    model.save_pretrained(folder)
    tokenizer = save_tokenizer(folder, pad=False)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def run_causal(folder: Path, family: str = "llama", *words: str) -> Path:
    """The folder of a finished run of two rounds: two clients, who learn to answer with the words of the question."""
    save_causal(folder / family, family)
    rng = torch.Generator().manual_seed(3)
    lines = []
    for _ in range(24):
        said = " ".join(WORDS[int(index)] for index in torch.randint(len(WORDS), (3,), generator=rng))
        lines.append(json.dumps({"prompt": said, "completion": said}))
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    (folder / "recipe.yaml").write_text(
        f"""
model: {{name: {folder / family}}}
lora: {{rank: 2, alpha: 4, targets: [query, value]}}
data: {{task: causal_lm, train: {folder / "pairs.jsonl"}, system: be very big, max_length: 40}}
partition: {{scheme: iid, clients: 2}}
algorithm: {{name: localadamw, lr: 5.0e-2}}
federation: {{rounds: 2, clients_per_round: 2}}
local: {{steps: 2, batch_size: 4}}
run: {{precision: float32, threads: 1, checkpoint_every: 1}}
"""
    )
    return run_recipe(folder / "recipe.yaml", words, folder / "run").folder
