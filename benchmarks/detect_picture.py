"""Draws docs/detection.png: what a small detector finds in pictures it has not seen.

    python benchmarks/detect_picture.py

The pictures are drawn by formula, shapes of any colour on a ground of any other, so nothing is
downloaded and nobody's photograph is shown. The detector is Mask R-CNN with a feature pyramid, but
with narrow layers and few regions an image, so that a CPU trains it in minutes.
"""

import argparse
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

from pages.common import ROOT
from xmoco.detect import evaluation, models
from xmoco.detect.detector_files import read_detector
from xmoco.detect.evaluation import evaluate_detect
from xmoco.detect.masks import runs_of_bitmap
from xmoco.detect.report import picture_detections
from xmoco.detect.sources import open_detection
from xmoco.evaluate.evaluation import EvalOptions

PICTURE = ROOT / "docs" / "detection.png"
SHAPES = ("disc", "square", "triangle", "ring")
SIDE = 128
CHANNELS, REGIONS = 48, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        png = made(options, Path(folder))
    small = io.BytesIO()
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(256).save(small, format="png", optimize=True)
    options.picture.write_bytes(small.getvalue())
    print(f"wrote {options.picture}, {len(small.getvalue()) / 1000:.0f} kB")


def made(options: argparse.Namespace, folder: Path) -> bytes:
    make_small()
    data = write_shapes(folder / "shapes", options.images)
    records = evaluate_detect(
        "scratch:tiny",
        data,
        model="mask-rcnn-fpn",
        schedule=f"{options.steps}-steps",
        batch=8,
        out=folder / "run",
        options=EvalOptions(options.device, size=options.size),
    )
    print({record.measure: round(record.value, 1) for record in records})
    detector, _ = read_detector(folder / "run")
    _, test = open_detection(data)
    return picture_detections(detector, test, torch.device("cpu"), columns=4)


def make_small() -> None:
    """Every detector that is built from now on is narrow, and has few regions an image."""
    real = models.build_detector
    models.PYRAMID_CHANNELS = CHANNELS

    def build(model: str, backbone: nn.Module, categories: int, **settings: Any) -> nn.Module:
        detector: Any = real(model, backbone, categories, **settings)
        heads, rpn = detector.roi_heads, detector.rpn
        heads.fg_bg_sampler.batch_size_per_image = REGIONS
        rpn._pre_nms_top_n = rpn._post_nms_top_n = {"training": 200, "testing": 100}
        heads.mask_head = MaskRCNNHeads(CHANNELS, (CHANNELS,) * 4, 1)
        heads.mask_predictor = MaskRCNNPredictor(CHANNELS, CHANNELS, categories + 1)
        return detector

    evaluation.build_detector = build
    import xmoco.detect.detector_files

    xmoco.detect.detector_files.build_detector = build


def write_shapes(folder: Path, images: int, judged: int = 24) -> Path:
    """In COCO's layout, for training and validation."""
    rng = np.random.default_rng(0)
    for split, count in (("train", images), ("val", judged)):
        (folder / split).mkdir(parents=True)
        entries, annotations = [], []
        for number in range(count):
            picture, things = drawn_shapes(rng)
            name = f"{split}/{number:04}.png"
            Image.fromarray(picture).save(folder / name)
            entries.append({"id": number, "file_name": name, "width": SIDE, "height": SIDE})
            annotations += [
                {"id": len(annotations) + place, "image_id": number, **thing}
                for place, thing in enumerate(things, start=1)
            ]
        content = {
            "images": entries,
            "annotations": annotations,
            "categories": [{"id": n, "name": name} for n, name in enumerate(SHAPES, start=1)],
        }
        (folder / f"instances_{split}.json").write_text(json.dumps(content))
    return folder


def drawn_shapes(rng: np.random.Generator) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """A picture of one to five shapes, later ones before earlier ones, on a smooth ground."""
    y, x = np.mgrid[:SIDE, :SIDE] / SIDE
    corners = rng.uniform(60, 200, (4, 3))
    top = corners[0] * (1 - x[..., None]) + corners[1] * x[..., None]
    bottom = corners[2] * (1 - x[..., None]) + corners[3] * x[..., None]
    picture = top * (1 - y[..., None]) + bottom * y[..., None]
    masks: list[tuple[int, np.ndarray]] = []
    for _ in range(rng.integers(1, 6)):
        shape, radius = int(rng.integers(len(SHAPES))), rng.uniform(0.1, 0.24)
        centre = rng.uniform(radius, 1 - radius, 2)
        mask = inside(shape, (x - centre[0]) / radius, (y - centre[1]) / radius, rng)
        masks = [(kind, other & ~mask) for kind, other in masks]
        masks.append((shape, mask))
        colour = rng.uniform(0, 255, 3)
        picture[mask] = colour + 25 * np.sin(rng.uniform(20, 60) * (x + y))[mask][:, None]
    picture += rng.normal(0, 6, picture.shape)
    things = [thing(kind, mask) for kind, mask in masks if mask.sum() > 60]
    return picture.clip(0, 255).astype(np.uint8), things


def inside(shape: int, x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Whether points are in a shape of radius 1, turned at random."""
    angle = rng.uniform(0, 2 * np.pi)
    across, down = x * np.cos(angle) - y * np.sin(angle), x * np.sin(angle) + y * np.cos(angle)
    distance = np.hypot(x, y)
    match SHAPES[shape]:
        case "disc":
            return distance < 0.9
        case "ring":
            return (distance < 1) & (distance > 0.55)
        case "square":
            return np.maximum(abs(across), abs(down)) < 0.7
    edges = [across * np.cos(a) + down * np.sin(a) for a in (0, 2 * np.pi / 3, 4 * np.pi / 3)]
    return np.max(edges, axis=0) < 0.5


def thing(kind: int, mask: np.ndarray) -> dict[str, Any]:
    rows, columns = np.nonzero(mask)
    left, top = int(columns.min()), int(rows.min())
    return {
        "category_id": kind + 1,
        "bbox": [left, top, int(columns.max()) + 1 - left, int(rows.max()) + 1 - top],
        "area": int(mask.sum()),
        "segmentation": {"size": [SIDE, SIDE], "counts": runs_of_bitmap(mask).tolist()},
    }


if __name__ == "__main__":
    main()
