"""What the model card of a run on images shows of its use."""

from __future__ import annotations

from fedllm.experiment.trained_files import processor_of
from fedllm.models.image_format import ImageProcessor
from fedllm.models.loading import Backbone
from fedllm.tasks.base import Task


def image_loading(backbone: Backbone, task: Task, whole: bool) -> str:
    """Python that loads the folder and answers for one image. whole: whether it holds a whole model, or an adapter."""
    images = processor_of(backbone, task)
    assert isinstance(images, ImageProcessor)
    size = images.side
    built = "import fedllm.models.conv_nets  # noqa: F401  makes this kind of model known to transformers\n"
    config = "" if whole else 'config = AutoConfig.from_pretrained(f"{folder}/base_config.json")\n'
    options = "" if whole else ", config=config, ignore_mismatched_sizes=True"
    names = "AutoModelForImageClassification" if whole else "AutoConfig, AutoModelForImageClassification"
    return (
        f"import numpy as np\nimport torch\nfrom PIL import Image\nfrom transformers import {names}\n\n"
        f"{built if backbone.model.config.model_type.startswith('fedllm') else ''}"
        'folder = "."  # this folder, or huggingface_hub.snapshot_download(its name on the Hub)\n'
        f"{config}model = AutoModelForImageClassification.from_pretrained(folder{options})\n"
        f'image = Image.open("an_image.png").convert("RGB").resize(({size}, {size}), Image.Resampling.BILINEAR)\n'
        f"values = (np.asarray(image) / 255 - {list(images.mean)}) / {list(images.std)}\n"
        "output = model(torch.tensor(values, dtype=torch.float32).permute(2, 0, 1)[None])\n"
        "print(model.config.id2label[int(output.logits.argmax())])\n"
    )
