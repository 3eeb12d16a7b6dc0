"""What the model card of a causal language model says in its own way: its task, and how to load and ask it."""

from __future__ import annotations

import json
from pathlib import Path

from fedllm.config.recipe import Recipe
from fedllm.data.conversations.conversation import ASSISTANT, USER, Conversation, Message
from fedllm.data.conversations.templates import ChatTemplate, find_template
from fedllm.models.loading import Backbone

_PLACE = "this folder, or huggingface_hub.snapshot_download(its name on the Hub)"
_ASK = (
    "answer = model.generate(**inputs, do_sample=False, max_new_tokens=64)\n"
    'print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))\n'
)


def causal_task(recipe: Recipe) -> str:
    """The task in one line."""
    data = recipe.data
    what = {"response": "every response", "last": "the last response", "all": "every token"}[str(data.learn)]
    return f"text generation; learned: {what} of a conversation; template {Path(str(data.template)).name}"


def causal_loading(recipe: Recipe, backbone: Backbone, merged: bool) -> str:
    """Python that loads the folder and generates an answer."""
    gguf = isinstance(backbone.source, Path) and backbone.source.suffix == ".gguf"
    quantised = recipe.model.quantize != "none"
    names = ["AutoModelForCausalLM", "AutoTokenizer", *(["BitsAndBytesConfig"] if quantised else [])]
    first = "import json\n\n" if quantised else ""
    model = "model = AutoModelForCausalLM.from_pretrained(folder)\n"
    if gguf and not merged:
        assert isinstance(backbone.source, Path)
        first += "from peft import PeftConfig, PeftModel\n"
        names.append("GgufConfig")
        model = _of_gguf(backbone.source.name, quantised)
    elif quantised:
        model = (
            f"{_QUANTIZATION}model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization)\n"
        )
    return (
        f"{first}from transformers import {', '.join(names)}\n\n"
        f'folder = "."  # {_PLACE}\n{model}tokenizer = AutoTokenizer.from_pretrained(folder)\n'
        f"{_inputs(recipe, backbone)}{_ASK}"
    )


_QUANTIZATION = 'quantization = BitsAndBytesConfig.from_dict(json.load(open(f"{folder}/quantization.json")))\n'


def _of_gguf(name: str, quantised: bool) -> str:
    """A GGUF base is read dequantised; a quantised one is that of a copy as safetensors."""
    lines = (
        "place = PeftConfig.from_pretrained(folder).base_model_name_or_path\n"
        f'gguf = {{"gguf_file": {json.dumps(name)}, "quantization_config": GgufConfig(dequantize=True)}}\n'
        "base = AutoModelForCausalLM.from_pretrained(place, **gguf)\n"
    )
    if quantised:
        lines += (
            f'base.save_pretrained("base")\n{_QUANTIZATION}'
            'base = AutoModelForCausalLM.from_pretrained("base", quantization_config=quantization)\n'
        )
    return f"{lines}model = PeftModel.from_pretrained(base, folder).eval()\n"


def _inputs(recipe: Recipe, backbone: Backbone) -> str:
    """Python that makes the inputs of one prompt, written as the run's samples were."""
    data, tokenizer = recipe.data, backbone.tokenizer
    assert tokenizer is not None
    if data.format == "text" or (data.template == "auto" and tokenizer.chat_template is None):
        return 'inputs = tokenizer("the beginning of a text", return_tensors="pt")\n'
    template = find_template(data.template, tokenizer)
    if not isinstance(template, ChatTemplate):
        asked = Conversation((Message(USER, "a question"), Message(ASSISTANT, "an answer")))
        (turn,) = template.turns(asked, [1])
        return f'inputs = tokenizer({_quoted(turn.before)}, return_tensors="pt")\n'
    system = [] if data.system is None else [f'{{"role": "system", "content": {_quoted(data.system)}}}']
    messages = ", ".join([*system, '{"role": "user", "content": "a question"}'])
    return (
        f"messages = [{messages}]\n"
        'options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}\n'
        "inputs = tokenizer.apply_chat_template(messages, **options)\n"
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
