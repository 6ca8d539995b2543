"""``xmoco detect``: pictures in; what is where on them as json, and drawn."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from xmoco.data import Unreadable
from xmoco.data.sources import all_pictures
from xmoco.detect.detector_files import read_detector
from xmoco.detect.drawing import drawn
from xmoco.detect.masks import runs_of_bitmap
from xmoco.detect.prediction import MASK_THRESHOLD, Sight, looked_at
from xmoco.errors import UserError
from xmoco.evaluate.evaluation import check_device
from xmoco.files import write_whole
from xmoco.pictures import left_out
from xmoco.text import printable
from xmoco.train.engine import choose_device

JSON = "detections.json"


@dataclass(frozen=True)
class Found:
    """Where everything is, and how much there is."""

    folder: Path
    json: Path
    images: int
    objects: int


def detect(
    weights: str | Path,
    images: str | Path,
    *,
    out: str | Path = "detections",
    threshold: float = 0.5,
    device: str = "auto",
    readers: int = 8,
    on_progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Found:
    """What a detector finds in a picture, or in all of a folder or an archive.

    ``weights`` are what ``load_detector`` takes. The new folder ``out`` gets ``detections.json``,
    with the boxes (left, top, right, bottom in pixels) of at least ``threshold``, and the pictures
    with these drawn. One that cannot be read is left out, and ``say`` told.
    """
    folder = Path(out)
    if folder.exists():
        raise UserError(f"{folder} already exists: choose another folder with --out.")
    if not 0 <= threshold <= 1:
        raise UserError(f"threshold={threshold:g} is not from 0 to 1.")
    check_device(device)
    detector, card = read_detector(weights)
    chosen = torch.device(choose_device(device))
    pictures, paths = all_pictures(images)
    broken = Unreadable(len(paths), left_out=True)
    told: dict[int, dict[str, Any]] = {}
    sights = looked_at(
        detector.to(chosen),
        pictures,
        chosen,
        readers=readers,
        unreadable=broken,
        on_progress=on_progress,
    )
    names = _drawn_names(paths)
    folder.mkdir(parents=True)
    try:
        for sight in sights:
            sure = _sure(sight, threshold)
            path = paths[sight.place]
            told[sight.place] = {"image": printable(path), **_as_json(sure, card.categories)}
            _draw(sure, card.categories, folder / names[sight.place])
    except UserError:  # none can be read
        shutil.rmtree(folder)
        raise
    if say is not None:
        for sentence in left_out(broken):
            say(sentence)
    content = [told[index] for index in sorted(told)]
    file = folder / JSON
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in content)
    write_whole(file, f"[\n{lines}\n]\n".encode())
    return Found(folder, file, len(content), sum(len(image["objects"]) for image in content))


def _drawn_names(paths: Sequence[str]) -> list[str]:
    """``a.png`` for ``a.jpg``, but ``a.jpg.png`` where there is another ``a``."""
    without = [PurePosixPath(path).with_suffix(".png") for path in paths]
    count = Counter(without)
    return [
        f"{path}.png" if count[name] > 1 else str(name)
        for path, name in zip(paths, without, strict=True)
    ]


def _sure(sight: Sight, threshold: float) -> Sight:
    """Without what is below the threshold, on the CPU."""
    sure = sight.output["scores"] >= threshold
    output = {name: values[sure].cpu() for name, values in sight.output.items()}
    return Sight(sight.place, sight.picture.cpu(), output)


def _as_json(sight: Sight, categories: tuple[str, ...]) -> dict[str, Any]:
    output, (height, width) = sight.output, sight.picture.shape[1:]
    objects: list[dict[str, Any]] = [
        {
            "category": categories[label - 1],
            "score": round(score, 4),
            "box": [round(side, 2) for side in box],
        }
        for label, score, box in zip(
            output["labels"].tolist(),
            output["scores"].tolist(),
            output["boxes"].tolist(),
            strict=True,
        )
    ]
    for entry, mask in zip(objects, _masks(output), strict=False):
        # COCO's run lengths: column by column, pixels off, on, off …
        entry["mask"] = {"size": [height, width], "counts": runs_of_bitmap(mask.numpy()).tolist()}
    return {"width": width, "height": height, "objects": objects}


def _masks(output: dict[str, Tensor]) -> list[Tensor]:
    masks = output.get("masks")
    return [] if masks is None else list(masks[:, 0] > MASK_THRESHOLD)


def _draw(sight: Sight, categories: tuple[str, ...], path: Path) -> None:
    output, masks = sight.output, _masks(sight.output)
    picture = drawn(
        sight.picture,
        output["boxes"],
        output["labels"],
        output["scores"],
        categories,
        torch.stack(masks) if masks else None,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture.permute(1, 2, 0).numpy()).save(path)
