"""One round of a client with a tiny classifier or causal language model, for training loops that are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
    default_data_collator,
)

from fedllm import load_algorithm
from fedllm.client import Broadcast, Client, FederatedTrainer, ParameterSpace, Upload, model_info
from fedllm.server import Server

STEPS = 4  # the most of a round
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
LONG = {"vocab_size": 32, "max_position_embeddings": 32}


def classifier(dropout: float = 0.0) -> nn.Module:
    """A BERT with LoRA; the same values in every process."""
    torch.manual_seed(3)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": 0.0}
    base = BertForSequenceClassification(BertConfig(**SMALL, **LONG, **rates, num_labels=3))
    return get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))


def causal() -> nn.Module:
    """A Llama whose weights are all trained."""
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**SMALL, **LONG, num_key_value_heads=2, pad_token_id=0))


MODELS = {"classifier": classifier, "causal": causal}


def rows(kind: str, count: int = 16) -> list[dict[str, Any]]:
    """Samples of 8 tokens; of those for the causal model, 1 to 7 tokens are learned."""
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(1, 32, (count, 8), generator=draw)
    if kind == "classifier":
        return [{"input_ids": each, "labels": int(each.sum()) % 3} for each in ids]
    learned = torch.randint(1, 8, (count,), generator=draw)
    kept = torch.arange(8) >= (8 - learned)[:, None]
    return [{"input_ids": each, "labels": labels} for each, labels in zip(ids, ids.where(kept, -100), strict=True)]


def round_of(kind: str, name: str = "fadamgc", round: int = 0, **model: Any) -> tuple[Client, Broadcast]:
    """A new client and the broadcast of a round."""
    made, alg = MODELS[kind](**model), load_algorithm(name, lr=0.01)
    info = model_info(alg, made, rounds=5, num_clients=3, sampled=3, local_steps=STEPS)
    server = Server(alg, ParameterSpace.of(made).gather(made), info)
    server.round = round
    return Client(made, alg, info, samples=16), server.broadcast(0)


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Arguments of a quiet trainer on the CPU: four steps of four samples, in the rows' order."""
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
    work = {"max_steps": STEPS, "per_device_train_batch_size": 4, "train_sampling_strategy": "sequential"}
    return TrainingArguments(str(folder), **{**quiet, **work, **changes})


def trained(kind: str, args: TrainingArguments, *, name: str = "fadamgc", model: Any = None, **others: Any) -> Upload:
    """The upload of a FederatedTrainer."""
    client, broadcast = round_of(kind, name, **(model or {}))
    given = {"train_dataset": rows(kind), "data_collator": default_data_collator}
    return FederatedTrainer(client, broadcast, args, **{**given, **others}).fit()


def assert_same(found: Upload, expected: Upload, tolerance: float) -> None:
    assert found.head == expected.head
    assert set(found) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=tolerance, atol=tolerance)


def main(folder: str) -> None:
    """Under torchrun: half of each step's samples in each of two processes; the upload of each process as a file."""
    for kind in MODELS:
        args = arguments(Path(folder), per_device_train_batch_size=2, ddp_backend="gloo")
        upload = trained(kind, args, name="fedavg")
        Path(folder, f"{kind}-{args.process_index}.safetensors").write_bytes(upload.to_bytes())


if __name__ == "__main__":
    import sys

    main(sys.argv[1])
