"""The transform for programs of one's own shows a backbone what evaluations show it."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.testing import assert_close
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import xmoco
from xmoco.config import DataConfig
from xmoco.data import open_images
from xmoco.evaluate.features import backbone_features
from xmoco.evaluate.transform import CentralView
from xmoco.nn.backbone_files import BackboneCard, save_backbone
from xmoco.nn.backbones import build_backbone

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


def saved(folder: Path, size: int, eval_size: int | None = None) -> Path:
    card = BackboneCard("tiny", "imagenet", size, MEAN, STD, "xmoco", 1, 0, eval_size)
    path = folder / "backbone.safetensors"
    save_backbone(build_backbone("tiny"), card, path)
    return path


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("shape", [(300, 200), (90, 170), (64, 64), (40, 30)])
def test_features_are_those_of_an_evaluation(tmp_path: Path, shape: tuple[int, int]) -> None:
    for family in "ab":
        (tmp_path / "images" / family).mkdir(parents=True)
        for seed in range(2):
            picture(*shape, seed).save(tmp_path / "images" / family / f"{seed}.png")
    weights = saved(tmp_path, size=64)
    transform, backbone = xmoco.load_transform(weights), xmoco.load_backbone(weights)
    data = ImageFolder(tmp_path / "images", transform)
    with torch.no_grad():
        own = backbone(torch.stack([view for view, _ in data]))

    images = open_images(DataConfig(source=str(tmp_path / "images")), "train")
    assert images is not None
    judged = backbone_features(backbone, images, transform.input, torch.device("cpu"))
    assert_close(torch.nn.functional.normalize(own), torch.nn.functional.normalize(judged.vectors))


def test_it_has_the_size_that_evaluations_show(tmp_path: Path) -> None:
    transform = xmoco.load_transform(saved(tmp_path, size=32, eval_size=40))
    assert transform(picture(50, 60)).shape == (3, 40, 40)


def test_who_knows_better_says_mean_and_std(tmp_path: Path) -> None:
    weights, half = saved(tmp_path, size=32), (0.5, 0.5, 0.5)
    transform = xmoco.load_transform(weights, mean=half, std=half)
    assert (transform.input.mean, transform.input.std) == (half, half)
    assert xmoco.load_transform(weights, mean=half).input.std == STD


def test_it_is_torchvisions_for_evaluation(tmp_path: Path) -> None:
    image = picture(310, 190)
    usual = v2.Compose(
        [
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Resize(146, antialias=True),
            v2.CenterCrop(128),
            v2.Normalize(MEAN, STD),
        ]
    )
    view = xmoco.load_transform(saved(tmp_path, size=128))(image)
    assert view.shape == (3, 128, 128)
    assert view.is_contiguous()
    assert_close(view, usual(image), rtol=0, atol=2e-4)


def test_any_kind_of_image(tmp_path: Path) -> None:
    transform = xmoco.load_transform(saved(tmp_path, size=64))
    image = picture(100, 80)
    expected = transform(image)
    assert_close(transform(v2.functional.pil_to_tensor(image)), expected)
    clear = image.convert("RGBA")
    assert_close(transform(clear), expected)
    clear.putalpha(0)
    white = Image.new("RGB", (100, 80), "white")
    assert_close(transform(clear), transform(white))
    turned = image.transpose(Image.Transpose.ROTATE_90)
    exif = turned.getexif()
    exif[0x0112] = 6  # to be shown turned by 90 degrees clockwise
    turned.save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as opened:
        assert_close(transform(opened), expected)


def test_workers_can_have_it(tmp_path: Path) -> None:
    transform = xmoco.load_transform(saved(tmp_path, size=64))
    assert pickle.loads(pickle.dumps(transform)) == transform
    assert isinstance(transform, CentralView)


@pytest.mark.parametrize(
    "image",
    [
        torch.zeros(3, 8, 8),
        torch.zeros(1, 8, 8, dtype=torch.uint8),
        torch.zeros(2, 3, 8, 8, dtype=torch.uint8),
    ],
)
def test_other_tensors_are_refused(tmp_path: Path, image: Tensor) -> None:
    with pytest.raises(ValueError, match="PIL image or a uint8 tensor"):
        xmoco.load_transform(saved(tmp_path, size=64))(image)
