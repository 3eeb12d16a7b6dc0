"""A tiny random Llama as a GGUF file, with weights of 4 bit, a tokenizer of bytes and a chat template."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from transformers.convert_slow_tokenizer import bytes_to_unicode

HIDDEN, LAYERS, HEADS, KV_HEADS, MLP = 64, 2, 4, 2, 96
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def save_gguf(path: Path, *, seed: int = 3) -> Path:
    """Writes the file and returns its path. Its output embedding is tied; the norms are float32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "block_count": LAYERS, "context_length": 64, "embedding_length": HIDDEN, "feed_forward_length": MLP,
        "head_count": HEADS, "head_count_kv": KV_HEADS, "vocab_size": 261,
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    _add_tokenizer(writer)
    _add_weights(writer, np.random.default_rng(seed))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = [*SPECIAL, *bytes_to_unicode().values(), "th", "the"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


def _add_weights(writer: gguf.GGUFWriter, rng: np.random.Generator) -> None:
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (MLP, HIDDEN), "ffn_up": (MLP, HIDDEN), "ffn_down": (HIDDEN, MLP),
    }  # fmt: skip

    def add(name: str, shape: tuple[int, ...]) -> None:
        values = rng.normal(0, 0.2, shape).astype(np.float32)
        packed = gguf.quants.quantize(values, GGMLQuantizationType.Q4_1)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=GGMLQuantizationType.Q4_1)

    add("token_embd", (261, HIDDEN))
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            add(f"blk.{layer}.{name}", shape)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32))
    writer.add_tensor("output_norm.weight", rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32))
