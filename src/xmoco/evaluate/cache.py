"""Features kept between evaluations, and found again by content.

The key is a digest of all that features depend on: the weights and their architecture, every image,
the view that is made of it. So nothing has to be named or thrown away by hand: other weights or
changed images are another key. A file holds the features, the labels and a digest of both, by which
damage is noticed; what is damaged is computed anew.
"""

import hashlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from xmoco.config import InputConfig
from xmoco.data import ImageSet, Unreadable
from xmoco.data.batches import Progress
from xmoco.data.fingerprint import content_digest, tensors_digest
from xmoco.errors import UserError
from xmoco.evaluate.features import Features, backbone_features, home, left_out_of
from xmoco.files import write_whole

FORMAT = 2
"""To be raised whenever the same weights and images give other features, or files look different:
what was kept before is then no longer found."""

LEFT_OUT = "left_out"
"""Under which a file has the images without features, and why they have none."""

_NAMES = {torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}
"""What safetensors calls the kinds of numbers that features and labels are."""


def default_cache() -> Path:
    """Where features are kept unless told otherwise; the folder may be deleted at any time."""
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "xmoco" / "features"


def cached_features(
    backbone: nn.Module,
    images: ImageSet,
    input: InputConfig,
    device: torch.device,
    *,
    readers: int = 8,
    border: bool = True,
    folder: Path | None,
    unreadable: Unreadable | None = None,
    on_reading: Progress | None = None,
    on_progress: Progress | None = None,
    say: Callable[[str], None],
) -> Features:
    """As ``backbone_features``, but kept in ``folder`` (nowhere if there is none).

    ``on_reading`` counts the images when they are read for the key; ``on_progress``, if their
    features are not there, when these are computed. ``say`` is told of damage, and when features
    cannot be kept; neither ends the evaluation. Images that cannot be read are left out, and
    ``unreadable`` is told of them each time.
    """
    unreadable = left_out_of(images) if unreadable is None else unreadable
    compute = partial(
        backbone_features, backbone, images, input, device, readers,
        border=border, unreadable=unreadable, on_progress=on_progress,
    )  # fmt: skip
    if folder is None:
        return compute()
    facts = (
        *(FORMAT, torch.__version__.split(".")[:2], device.type),  # devices round differently
        *(repr(backbone), tensors_digest(backbone.state_dict())),
        content_digest(images, readers, on_reading),
        *(input.central_size, input.mean, input.std, border),
    )
    key = hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
    path = folder / f"{key}.safetensors"
    kept = _load(path, len(images), device, say)
    if kept is not None:
        features, reasons = kept
        unreadable.add_all((images.where(place), why) for place, why in reasons.items())
        return features
    features = compute()
    gone, seen = dict(unreadable), {*features.places.tolist()}
    left_out = (place for place in range(len(images)) if place not in seen) if gone else ()
    _keep(features, {place: gone[images.where(place)] for place in left_out}, path, say)
    return features


_Reasons = dict[int, str]
"""Why the images at some places were left out."""


def _load(
    path: Path, images: int, device: torch.device, say: Callable[[str], None]
) -> tuple[Features, _Reasons] | None:
    """What is kept at ``path`` of so many images, if it is there and whole."""
    try:
        with safe_open(path, framework="pt") as file:
            names, written = file.keys(), file.metadata() or {}
            # Copied, because safetensors only maps the file: what became of it would come through.
            tensors = {name: file.get_tensor(name).clone() for name in names}
        if written != _seal(path, tensors, written.get(LEFT_OUT, "")):
            raise SafetensorError("they are not what was written there")
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        say(f"the features kept in {path} are damaged ({error}) and are computed again.")
        return None
    vectors = tensors["vectors"]
    reasons = {int(place): why for place, why in json.loads(written[LEFT_OUT]).items()}
    places = torch.tensor([place for place in range(images) if place not in reasons])
    home_of_them = home(len(vectors), vectors.shape[1], device)
    return Features(vectors.to(home_of_them), tensors.get("labels"), places), reasons


def _keep(features: Features, reasons: _Reasons, path: Path, say: Callable[[str], None]) -> None:
    tensors = {"vectors": features.vectors.cpu()}
    if features.labels is not None:
        tensors["labels"] = features.labels
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, partial(_write, tensors, _seal(path, tensors, json.dumps(reasons))))
    except (OSError, UserError) as error:
        cause = error.__cause__ or error
        reason = getattr(cause, "strerror", None) or cause
        say(f"features cannot be kept in {path.parent}: {reason}. It goes on without.")


def _seal(path: Path, tensors: dict[str, Tensor], left_out: str) -> dict[str, str]:
    """What a file says of itself, by which damage and mistaken names are noticed."""
    digest = hashlib.blake2b(f"{tensors_digest(tensors)} {left_out}".encode(), digest_size=16)
    return {"key": path.stem, "digest": digest.hexdigest(), LEFT_OUT: left_out}


def _write(tensors: dict[str, Tensor], metadata: dict[str, str], file: BinaryIO) -> None:
    """Write a safetensors file straight from the tensors' memory.

    The library would first copy everything into one piece or, in other versions, write a temporary
    file of its own, which nothing sends to the disk.
    """
    header: dict[str, object] = {"__metadata__": metadata}
    # The widest numbers first, so that all lie at multiples of their size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        file.write(tensor.contiguous().numpy().data)
