"""Tells whether images or weights are still those they were.

``fingerprint`` glances at names; the digests look at every byte.
"""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from xmoco.data.batches import Progress
from xmoco.data.decode import UnreadableImage
from xmoco.data.imagesets import ImageSet

LOOKED_AT = 1000
IMAGES_PER_TASK = 64
BYTES_PER_TASK = 2**26


def fingerprint(images: ImageSet, with_labels: bool = False) -> str:
    """A short text that changes with the number of images and, very likely, with their names.

    Names are looked at here and there, so that a set of millions takes no longer than a small one;
    where the set lies does not matter, nor does what the images show. ``with_labels``, it changes
    with any label or class.
    """
    step = max(1, len(images) // LOOKED_AT)
    names = [PurePath(images.where(index)).name for index in range(0, len(images), step)]
    digest = hashlib.blake2b("\n".join(names).encode(errors="replace"), digest_size=8)
    text = f"{len(images)} images, names {digest.hexdigest()}"
    if not with_labels:
        return text
    labels = hashlib.blake2b(_labels_text(images).encode(errors="replace"), digest_size=8)
    return f"{text}, labels {labels.hexdigest()}"


def content_digest(images: ImageSet, readers: int = 8, on_progress: Progress | None = None) -> str:
    """A text that changes with any image, with their order, and with their labels and classes.

    Every image is read, though not decoded. What files are called and where they lie does not
    matter.
    """

    def digests(first: int) -> list[bytes]:
        after = min(first + IMAGES_PER_TASK, len(images))
        return [_digest(_content(images, index)) for index in range(first, after)]

    whole = hashlib.blake2b(_labels_text(images).encode(), digest_size=16)
    done = 0
    with ThreadPoolExecutor(readers, "xmoco-digest") as pool:
        for part in pool.map(digests, range(0, len(images), IMAGES_PER_TASK)):
            whole.update(b"".join(part))
            done += len(part)
            if on_progress is not None:
                on_progress(done, len(images))
    return whole.hexdigest()


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """A text that changes with the names, shapes, kinds and values of tensors."""
    whole = hashlib.blake2b(digest_size=16)
    with ThreadPoolExecutor(thread_name_prefix="xmoco-digest") as pool:
        for name, tensor in sorted(tensors.items()):
            whole.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
            # Flat first: what holds a single number has no bytes to be viewed as.
            content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            parts = (
                content[i : i + BYTES_PER_TASK] for i in range(0, len(content), BYTES_PER_TASK)
            )
            for digest in pool.map(_digest, parts):
                whole.update(digest)
    return whole.hexdigest()


def _labels_text(images: ImageSet) -> str:
    labels = {} if images.labels is None else {"labels": images.labels}
    return repr((images.classes, tensors_digest(labels)))


def _content(images: ImageSet, index: int) -> bytes:
    """What the image is read from: its file and how that is decoded, or else its pixels."""
    try:
        file = images.encoded(index)
        if file is not None:
            return f"{file.short_side}\n".encode() + file.data
        image = images.read(index)
        return repr(image.shape).encode() + image.numpy().tobytes()
    except UnreadableImage:  # will be replaced, which the images around it decide
        return b"unreadable"


def _digest(content: Any) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
