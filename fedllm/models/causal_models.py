"""Which checkpoints are causal language models: decoders that predict a token from those before it."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from fedllm.common.errors import UserError
from fedllm.models.settings import ModelSettings
from fedllm.tasks.heads import Head

_EXPECTED = "data.task=causal_lm expects a causal language model such as Llama, Qwen, Gemma, Phi, Mistral or GPT-2"
# What transformers calls the models whose outputs are not tokens.
_OTHER_HEADS = ("Classification", "QuestionAnswering", "MultipleChoice", "RewardModel")


def is_causal(head: Head) -> bool:
    """Whether a head is that of a causal language model."""
    return head.auto_class == "AutoModelForCausalLM"


def require_causal(model: ModelSettings, config: PreTrainedConfig) -> None:
    """Raises UserError, naming the kind that was found, unless the checkpoint is a causal language model.

    A masked language model (BERT) counts as one only if its config says is_decoder: otherwise its tokens see those
    behind them, and transformers would train it to copy. So does a model whose checkpoint ends in a classifier.
    """
    if found := _other_kind(config, pretrained=model.pretrained):
        raise UserError(f"model.name={model.name}: found {found}; {_EXPECTED}")


def _other_kind(config: PreTrainedConfig, *, pretrained: bool) -> str | None:
    kind = config.model_type
    if config.is_encoder_decoder:
        return f"an encoder-decoder ({kind})"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"a model of type {kind}, which transformers has no causal language model for"
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        return f"a masked language model ({kind}), whose tokens see those behind them"
    net: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if net.__name__.endswith("ForConditionalGeneration"):
        return f"a model of texts and other inputs ({kind}), of which only the language model could be trained"
    heads = [name for name in config.architectures or () if name.endswith(_OTHER_HEADS)]
    return f"a checkpoint of {heads[0]}, which has no output embedding" if heads and pretrained else None


def template_notes(name: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """What a user should know of the chat template of the model called `name`."""
    if tokenizer.chat_template is not None:
        return ()
    return (f"model '{name}' has no chat template: it is a base model, and conversations need data.template",)
