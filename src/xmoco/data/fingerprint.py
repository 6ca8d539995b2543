"""Tells whether a set of images is still the one it was."""

import hashlib
from pathlib import PurePath

from xmoco.data.imagesets import ImageSet

LOOKED_AT = 1000


def fingerprint(images: ImageSet) -> str:
    """A short text that changes with the number of images and, very likely, with their names.

    Names are looked at here and there, so that a set of millions takes no longer than a small one;
    where the set lies does not matter, nor does what the images show.
    """
    step = max(1, len(images) // LOOKED_AT)
    names = [PurePath(images.where(index)).name for index in range(0, len(images), step)]
    digest = hashlib.blake2b("\n".join(names).encode(errors="replace"), digest_size=8)
    return f"{len(images)} images, names {digest.hexdigest()}"
