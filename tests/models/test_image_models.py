"""The image models: sizes by hand, their start, saving and loading, blocks, and how they read images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_images import CLASSES, SIDE, save_model
from torch import nn
from transformers import AutoModelForImageClassification, SwinConfig, ViTConfig

from fedllm.blocks import partition
from fedllm.common.errors import UserError
from fedllm.data.pixels import ImageFormat
from fedllm.models.image_models import BUILT, sinusoids
from fedllm.models.loading import Backbone, load_backbone
from fedllm.models.norms import apply_norm
from fedllm.models.settings import BUILT_NAMES, ModelSettings
from fedllm.tasks.heads import image_head

TEN = [str(number) for number in range(10)]

# Weights and biases, layer by layer. A residual stage has two blocks of two convolutions; all but the first begin with
# a wider block and a 1x1 shortcut. Every norm has two vectors.
WIDTHS = (64, 128, 256, 512)
STAGES = sum(
    9 * (a * b + 3 * b * b) + (0 if a == b else a * b) for a, b in zip((64, *WIDTHS[:-1]), WIDTHS, strict=True)
)
CONVOLUTIONS = 27 * 64 + STAGES
FILTERS = 64 + sum(4 * width for width in WIDTHS) + sum(WIDTHS[1:])  # as many as channels of norms
RESNET = CONVOLUTIONS + 2 * FILTERS + 10 * 512 + 10
LAYER = 4 * (192 * 192 + 192) + 2 * 192 * 768 + 768 + 192 + 4 * 192
COUNTED = {
    # parameters; blocks: by filter, by neuron, and one a vector
    "cnn": (
        27 * 32 + 9 * 32 * 64 + 16 * 64 * 128 + 1280 + (32 + 64) * 3 + 128 + 10,
        (32 + 64) + (128 + 10) + (2 * 3 + 2),
    ),
    "resnet18": (RESNET, FILTERS + 2 * 20 + 10 + 1),
    "resnet18_gn": (RESNET, FILTERS + 2 * 20 + 10 + 1),
    # class token, 65 positions, patches; 6 layers with 3 heads; norm; head
    "vit_tiny": (
        192 + 65 * 192 + (48 * 192 + 192) + 6 * LAYER + 2 * 192 + 1930,
        1 + 65 + 192 + 1 + 6 * ((3 + 3 + 192 + 192 + 4) + (768 + 1) + (192 + 1) + 4) + 2 + (10 + 1),
    ),
}


def built(name: str, classes: list[str] = TEN, side: int = 32, seed: int = 0) -> Backbone:
    return load_backbone(ModelSettings(name=name), image_head(classes, side), seed=seed)


@pytest.mark.parametrize("name", BUILT_NAMES)
def test_sizes_and_blocks_are_those_counted_by_hand(name: str) -> None:
    model = built(name).model
    parameters = [*model.parameters()]
    assert sum(map(torch.numel, parameters)) == COUNTED[name][0]
    blocks = {scheme: partition(model, scheme, trainable_only=False) for scheme in ("hessian", "tensor", "none")}
    assert {scheme: each.num_blocks for scheme, each in blocks.items()} == {
        "hessian": COUNTED[name][1], "tensor": len(parameters), "none": 1,
    }  # fmt: skip
    assert int(blocks["hessian"].sizes.sum()) == COUNTED[name][0]
    assert partition(model, "elementwise", trainable_only=False).num_blocks == COUNTED[name][0]


def test_resnet18_is_the_one_that_cifar_is_known_with() -> None:
    assert RESNET == 11_173_962
    features = built("resnet18").model.features(torch.zeros(1, 3, 32, 32))
    assert features.shape == (1, 512)
    maps = built("resnet18").model.features[:-2](torch.zeros(1, 3, 32, 32))
    assert maps.shape == (1, 512, 4, 4), "three stages halve 32 pixels, and nothing else"


def test_the_norm_is_the_names() -> None:
    kinds = {name: {type(m) for m in built(name).model.modules()} for name in ("cnn", "resnet18", "resnet18_gn")}
    assert {name: nn.BatchNorm2d in found for name, found in kinds.items()} == {
        "cnn": False, "resnet18": True, "resnet18_gn": False,
    }  # fmt: skip
    norms = [m for m in built("resnet18_gn").model.modules() if isinstance(m, nn.GroupNorm)]
    assert len(norms) == 20
    assert {norm.num_groups for norm in norms} == {2}


def test_group_norm_in_the_place_of_batch_norm_is_the_model_that_has_it() -> None:
    """resnet18 with model.norm=group begins with the weights of resnet18_gn, and gives its logits."""
    images, model = torch.randn(2, 3, 32, 32), built("resnet18").model
    apply_norm(model, "group", "resnet18")
    with torch.no_grad():
        assert torch.equal(model(images).logits, built("resnet18_gn").model(images).logits)


def test_names_are_listed_once() -> None:
    assert tuple(BUILT) == BUILT_NAMES == tuple(COUNTED)


@pytest.mark.parametrize("name", ["cnn", "resnet18", "vit_tiny"])
def test_a_seed_is_a_model_and_a_folder_gives_it_back(tmp_path: Path, name: str) -> None:
    model, images = built(name, CLASSES, SIDE).model, torch.randn(2, 3, SIDE, SIDE)
    before = torch.random.get_rng_state()
    same, other = built(name, CLASSES, SIDE).model, built(name, CLASSES, SIDE, seed=1).model
    assert torch.equal(torch.random.get_rng_state(), before)
    found = [each(pixel_values=images).logits for each in (model, same, other)]
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])
    model.save_pretrained(tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(again(pixel_values=images).logits, found[0])
    assert again.config.id2label == dict(enumerate(CLASSES))


def test_vit_tiny_begins_as_the_paper_says() -> None:
    model = built("vit_tiny").model
    config = model.config
    assert (config.patch_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (
        4,
        192,
        6,
        3,
    )
    assert (config.hidden_dropout_prob, config.hidden_act) == (0.1, "gelu")
    positions = next(value for name, value in model.named_parameters() if name.endswith("position_embeddings"))
    assert torch.equal(positions[0], sinusoids(65, 192))
    table = sinusoids(3, 4)
    torch.testing.assert_close(table[2], torch.tensor([2.0, 2.0, 0.02, 0.02]).sin().where(
        torch.tensor([True, False, True, False]), torch.tensor([2.0, 2.0, 0.02, 0.02]).cos()
    ))  # fmt: skip
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert not module.bias.any()
            limit = (6 / sum(module.weight.shape)) ** 0.5
            assert 0.95 * limit < float(module.weight.abs().max()) <= limit


PRETRAINED = {
    # ViT-Base: 12 layers of 12 heads, 197 positions of 768, patches of 16; no head of its own is trained here
    "vit": (ViTConfig(), 1 + 197 + 768 + 1 + 12 * ((12 + 12 + 768 + 768 + 4) + 3073 + 769 + 4) + 2 + 3),
    # Swin-Tiny: patches; per layer: heads, a table of relative positions by head, MLP, two norms; merges; norm
    "swin": (
        SwinConfig(),
        96 + 1 + 2
        + sum(
            depth * ((3 * heads + 2 * width + 4) + (4 * width + 1) + (width + 1) + 4)
            for depth, heads, width in ((2, 3, 96), (2, 6, 192), (6, 12, 384), (2, 24, 768))
        )
        + sum(2 * width + 2 for width in (96, 192, 384)) + 2 + 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", PRETRAINED)
def test_blocks_of_vit_base_and_swin_tiny(family: str) -> None:
    config, blocks = PRETRAINED[family]
    with torch.device("meta"):
        model = AutoModelForImageClassification.from_config(config)
    assert config.num_labels == 2
    assert partition(model).num_blocks == blocks
    assert partition(model, "tensor").num_blocks == len([*model.parameters()])


def test_how_a_model_reads_images(tmp_path: Path) -> None:
    processor = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.25]}
    folders = [save_model(tmp_path / "with", "vit", processor), save_model(tmp_path / "without", "swin")]
    found = [load_backbone(ModelSettings(name=name), image_head(CLASSES, 8)).images for name in folders]
    assert found == [
        ImageFormat(SIDE, (0.5, 0.4, 0.3), (0.2, 0.2, 0.25), patches=16), ImageFormat(SIDE, None, None, patches=64),
    ]  # fmt: skip
    assert built("resnet18").images == ImageFormat(None, None, None, patches=64)
    path = tmp_path / "with" / "preprocessor_config.json"
    for wrong in (
        {"image_mean": [0.5] * 3},
        {**processor, "image_std": [0.2, 0.2, 0]},
        {**processor, "image_mean": [1]},
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(UserError, match=r"preprocessor_config\.json: "):
            load_backbone(ModelSettings(name=folders[0]), image_head(CLASSES, 8))


def test_a_model_of_one_channel_or_a_quantised_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="images of 1 channels, expected 3"):
        load_backbone(ModelSettings(name=save_model(tmp_path, "vit", num_channels=1)), image_head(CLASSES, 8))
    with pytest.raises(UserError, match="needs a pretrained model, but cnn begins at random"):
        load_backbone(ModelSettings(name="cnn", quantize="4bit"), image_head(CLASSES, 8))
