"""Small causal language models with adapters, and samples whose last tokens are learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING

from fedllm.data.client_batches import ClientBatches
from fedllm.data.tokenization import Tokens
from fedllm.problems.lora.engine_settings import EngineSettings
from fedllm.problems.lora.problem import LoraProblem
from fedllm.tasks.causal_lm import CausalLM

WORDS = 50
LENGTHS = [9, 30, 12, 5, 25, 7, 16, 28, 11, 6, 8, 21]
LEARNED = [3, 20, 1, 2, 9, 6, 8, 27, 4, 5, 2, 10]
_SMALL = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 2,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GPT2 = {
    "vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2,
    "activation_function": "gelu_pytorch_tanh", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama": (_SMALL, ["q_proj", "v_proj"]),
    "mistral": ({**_SMALL, "sliding_window": None}, ["q_proj", "v_proj"]),
    "qwen2": ({**_SMALL, "tie_word_embeddings": True}, ["q_proj", "v_proj", "down_proj"]),
    "qwen3": ({**_SMALL, "head_dim": 8}, ["q_proj", "v_proj"]),
    "gemma2": ({**_SMALL, "head_dim": 8, "final_logit_softcapping": 3.0, "sliding_window": 64}, ["q_proj", "v_proj"]),
    "gemma3_text": ({**_SMALL, "head_dim": 8, "sliding_window": 64}, ["q_proj", "v_proj"]),
    "phi3": (_SMALL, ["o_proj", "down_proj"]),
    "gpt2": (_GPT2, ["attn.c_proj", "c_fc"]),
    "granite": ({**_SMALL, "logits_scaling": 4.0}, ["q_proj", "v_proj"]),
    "cohere": ({**_SMALL, "logit_scale": 0.25}, ["q_proj", "v_proj"]),
}


def causal_model(family: str, dropout: float = 0.0) -> PreTrainedModel:
    """A random causal language model with WORDS words, the same one at every call."""
    config = CONFIG_MAPPING[family](**FAMILIES[family][0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.config.use_cache = False
    return model.requires_grad_(False).eval()


def adapted_causal(family: str, dropout: float = 0.0) -> Any:
    """The same with LoRA adapters whose B are not zero."""
    config = LoraConfig(
        task_type="CAUSAL_LM", r=2, lora_alpha=4, target_modules=FAMILIES[family][1], lora_dropout=dropout
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        model = get_peft_model(causal_model(family), config)
        for name, value in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(value, std=0.2)
    return model.eval()


def causal_tokens(lengths: Sequence[int] = LENGTHS, learned: Sequence[int] = LEARNED, seed: int = 0) -> Tokens:
    """Samples of these lengths, whose last `learned` tokens are learned; the very last is 2, eos and pad."""
    ends = torch.tensor([0, *np.cumsum(lengths)])
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, WORDS, (int(ends[-1]),), dtype=torch.int32, generator=draw)
    ids[ends[1:] - 1] = 2
    marks = torch.zeros(len(ids), dtype=torch.bool)
    for end, count in zip(ends[1:].tolist(), learned, strict=True):
        marks[end - count : end] = True
    return Tokens(ids, None, ends, torch.zeros(len(lengths), dtype=torch.long), marks)


def causal_problem(
    model: Any, tokens: Tokens | None = None, *, batch_size: int = 4, clients: int = 3, **settings: Any
) -> LoraProblem:
    """Clients who share the samples out in turn. settings: of EngineSettings; pad_id 2 unless told otherwise."""
    tokens = causal_tokens() if tokens is None else tokens
    parts = [np.arange(client, len(tokens), clients) for client in range(clients)]
    batches = ClientBatches(parts, batch_size=batch_size, epochs=1, steps=None, seed=0)
    return LoraProblem(model, tokens, batches, CausalLM().losses, EngineSettings(**{"pad_id": 2, **settings}))


def plain_loss(model: Any, tokens: Tokens, samples: Sequence[int]) -> torch.Tensor:
    """transformers' own loss of these samples in one padded batch; its mean is over all their learned tokens."""
    inputs = tokens.rows(torch.tensor(samples), pad_id=2)
    labels = torch.full_like(inputs["input_ids"], -100)
    for row, sample in enumerate(samples):
        begin, end = tokens.offsets[sample : sample + 2].tolist()
        marks = tokens.learned[begin:end]
        labels[row, : end - begin][marks] = tokens.input_ids[begin:end][marks].long()
    loss: torch.Tensor = model(**inputs, labels=labels).loss
    return loss
