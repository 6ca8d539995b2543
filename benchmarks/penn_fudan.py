"""Penn-Fudan's pedestrians, whose masks are PNG files, in COCO's layout."""

import io
import json
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from xmoco.data.batches import epoch_order
from xmoco.data.trees import FolderTree, Tree, open_tar
from xmoco.detect.masks import runs_of_bitmap

HELD_OUT = 50  # of 170, as in torchvision's tutorial


def write_penn_fudan(
    source: Path, folder: Path, held_out: int = HELD_OUT, only: int | None = None
) -> Path:
    """Images and annotations in ``folder``; ``only`` so many images, which are judged as well."""
    tree: Tree = FolderTree(source) if source.is_dir() else open_tar(source)
    paths = [path for path in tree.images() if "JPEGImages/" in path or "PNGImages/" in path]
    order = [paths[place] for place in epoch_order(len(paths), seed=0, epoch=0).tolist()]
    if only is not None:
        splits = {"train": order[:only], "val": order[:only]}
    else:
        splits = {"train": order[held_out:], "val": order[:held_out]}
    for split, chosen in splits.items():
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number, path in enumerate(sorted(chosen)):
            name = f"{split}/{path.rpartition('/')[2]}"
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(tree.read(path))
            mask = _mask(tree, path)
            height, width = mask.shape
            images.append({"id": number, "file_name": name, "width": width, "height": height})
            annotations += [
                {"id": len(annotations) + place, "image_id": number, **_person(mask == instance)}
                for place, instance in enumerate(np.unique(mask[mask > 0]), start=1)
            ]
        content = {
            "images": images,
            "annotations": annotations,
            "categories": [{"id": 1, "name": "pedestrian"}],
        }
        (folder / f"instances_{split}.json").write_text(json.dumps(content))
    return folder


def _mask(tree: Tree, path: str) -> np.ndarray:
    image = PurePosixPath(path)
    masks = image.parent.parent / "PedMasks"  # the source may be PennFudanPed itself
    file = f"{masks / image.stem}_mask.png"
    if not tree.holds(file):
        file = f"{masks / image.stem}.png"
    return np.asarray(Image.open(io.BytesIO(tree.read(file))))


def _person(mask: np.ndarray) -> dict[str, Any]:
    rows, columns = np.nonzero(mask)
    left, top = int(columns.min()), int(rows.min())
    return {
        "category_id": 1,
        "bbox": [left, top, int(columns.max()) + 1 - left, int(rows.max()) + 1 - top],
        "area": int(mask.sum()),
        "iscrowd": 0,
        "segmentation": {"size": list(mask.shape), "counts": runs_of_bitmap(mask).tolist()},
    }
