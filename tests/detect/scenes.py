"""Small pictures with boxes: coloured rectangles and discs on noise, written as COCO's json."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CATEGORIES = ("block", "disc")


def scene(rng: np.random.Generator, side: int) -> tuple[Image.Image, list[dict[str, Any]]]:
    """A picture of one to three things that do not overlap, and what COCO says of them."""
    pixels = rng.integers(90, 140, (side, side, 3)).astype(np.uint8)
    y, x = np.mgrid[:side, :side]
    taken = np.zeros((side, side), dtype=bool)
    things: list[dict[str, Any]] = []
    for _ in range(rng.integers(1, 4)):
        wide, high = rng.integers(side // 3, side // 2 + 4, 2)
        left, top = rng.integers(0, side - wide), rng.integers(0, side - high)
        disc = bool(rng.integers(2))
        inside = (x >= left) & (x < left + wide) & (y >= top) & (y < top + high)
        mask = inside
        if disc:
            across, down = (x - left + 0.5) / wide - 0.5, (y - top + 0.5) / high - 0.5
            mask = across**2 + down**2 <= 0.25
        if taken[inside].any():
            continue
        taken |= inside
        pixels[mask] = (230, 60, 40) if disc else (40, 80, 230)
        runs = np.flatnonzero(np.diff(np.concatenate([[0], mask.ravel("F")])))
        counts = np.diff(runs, prepend=0, append=mask.size)
        things.append(
            {
                "bbox": [int(left), int(top), int(wide), int(high)],
                "category_id": 1 + disc,
                "area": int(mask.sum()),
                "iscrowd": 0,
                "segmentation": {"size": [side, side], "counts": counts.tolist()},
            }
        )
    return Image.fromarray(pixels), things


def write_scenes(folder: Path, train: int = 4, val: int = 2, side: int = 64, seed: int = 0) -> Path:
    """A folder in COCO's layout; ``val`` 0 judges by the training images themselves."""
    rng = np.random.default_rng(seed)
    for split, count in (("train", train), ("val", val)):
        (folder / split).mkdir(parents=True)
        images, annotations = [], []
        for number in range(count):
            picture, things = scene(rng, side)
            name = f"{split}/{number:03}.png"
            picture.save(folder / name)
            images.append({"id": number, "file_name": name, "width": side, "height": side})
            annotations += [{"image_id": number, **thing} for thing in things]
        numbered = [{"id": number, **entry} for number, entry in enumerate(annotations, start=1)]
        content = {"images": images, "annotations": numbered, "categories": categories()}
        (folder / f"instances_{split}.json").write_text(json.dumps(content))
    if val == 0:
        text = (folder / "instances_train.json").read_text()
        (folder / "instances_val.json").write_text(text)
    return folder


def categories() -> list[dict[str, Any]]:
    return [{"id": number, "name": name} for number, name in enumerate(CATEGORIES, start=1)]
