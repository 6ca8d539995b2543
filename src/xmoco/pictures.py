"""Every picture of a folder or an archive, shown to a network."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from xmoco.config import DataConfig, InputConfig
from xmoco.data import Unreadable
from xmoco.data.sources import all_pictures
from xmoco.data.views import central_short_side
from xmoco.evaluate.evaluation import Listener, expect_numbers
from xmoco.evaluate.features import backbone_features


class Seen(NamedTuple):
    names: list[str]
    """Paths in the folder or the archive."""
    vectors: Tensor
    """float32 (pictures, length), on the CPU."""


def show_pictures(
    network: nn.Module,
    images: str | Path,
    input: InputConfig,
    device: torch.device,
    *,
    readers: int = 8,
    listener: Listener | None = None,
) -> Seen:
    """What a network makes of central views. A picture that cannot be read is left out, and the
    listener told."""
    listener = listener or Listener()
    # Shrunk when decoded, as for evaluations: a batch of whole photographs takes gigabytes.
    short_side = max(DataConfig().short_side, central_short_side(input.central_size))
    pictures, paths = all_pictures(images, short_side)
    broken = Unreadable(len(pictures), left_out=True)
    found = backbone_features(
        network,
        pictures,
        input,
        device,
        readers=readers,
        unreadable=broken,
        on_progress=lambda done, total: listener.progress("pictures", done, total),
    )
    for sentence in left_out(broken):
        listener.say(sentence)
    expect_numbers(found)
    return Seen([paths[place] for place in found.places.tolist()], found.vectors.cpu())


def left_out(broken: Unreadable) -> list[str]:
    """What is said of pictures that could not be read."""
    return [f"{where} cannot be read ({why}); it was left out." for where, why in broken]
