"""A stand-in for the GPU, so that what happens around it can be tested anywhere."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from xmoco.data import jpeg, streaming


class HostStream:
    """A CUDA stream that is none."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The GPU's part is played by the CPU; counts the calls of the decoder."""
    import torchvision.io

    seen = SimpleNamespace(calls=[])
    decode = torchvision.io.decode_jpeg

    def counting(files: list[Tensor], **options: Any) -> list[Tensor]:
        seen.calls.append(len(files))
        return decode(files, **options)

    monkeypatch.setattr(torchvision.io, "decode_jpeg", counting)
    monkeypatch.setattr(torch.cuda, "Stream", HostStream)
    monkeypatch.setattr(torch.cuda, "current_stream", HostStream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(streaming, "_decoding", streaming._ByGpu)
    jpeg.nvjpeg_works.cache_clear()
    yield seen
    jpeg.nvjpeg_works.cache_clear()
