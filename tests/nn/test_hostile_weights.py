"""Weights and checkpoints that were made to do harm: one sentence, nothing run, little memory."""

import argparse
import contextlib
import io
import os
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from xmoco.errors import UserError
from xmoco.nn.backbones import build_backbone
from xmoco.nn.weights import load_weights
from xmoco.pickles import CodeInPickle, RefusedPickle, read_pickle

ODD_TENSORS: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "without content": lambda: torch.empty(3, 3, device="meta"),
    "complex": lambda: torch.eye(3, dtype=torch.complex64),
    "expanded": lambda: torch.zeros(1).expand(10**12),
}


def saved(path: Path, content: Any, zipped: bool = True) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


def resnet() -> dict[str, Tensor]:
    return dict(build_backbone("tiny", "cifar").state_dict())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD_TENSORS)
@pytest.mark.parametrize("inside", [True, False])
def test_tensors_that_are_not_numbers_in_memory(tmp_path: Path, kind: str, inside: bool) -> None:
    tensor = ODD_TENSORS[kind]()
    content = resnet() | {"conv1.weight": tensor} if inside else tensor
    with pytest.raises(UserError, match=r"not simply numbers in memory .*refused\.$"):
        load_weights(saved(tmp_path / "odd.pth", content))


def in_itself() -> dict[str, Any]:
    content: dict[str, Any] = dict(resnet())
    content["model"] = {"again": content}
    return content


def list_in_itself() -> dict[str, Any]:
    inner: list[Any] = [1]
    inner.append(inner)
    return resnet() | {"more": inner}


def doubled() -> dict[str, Any]:
    content: Any = dict(resnet())
    for _ in range(40):
        content = {"a": content, "b": content}
    return {"model": content}


def deep() -> dict[str, Any]:
    content: Any = dict(resnet())
    for _ in range(150):
        content = [content]
    return {"model": content}


@pytest.mark.parametrize("make", [in_itself, list_in_itself, doubled, deep])
def test_state_without_end(tmp_path: Path, make: Callable[[], Any]) -> None:
    with pytest.raises(UserError, match=r"(refers to itself|nested too deeply), and was refused"):
        load_weights(saved(tmp_path / "odd.pth", make()))


def test_what_stands_twice_is_no_harm(tmp_path: Path) -> None:
    settings = argparse.Namespace(rate=0.1, more=[1, 2, (3, {"a": None})])
    content = OrderedDict(state_dict=resnet(), args=settings, again=settings, sizes=[1] * 10**5)
    path = saved(tmp_path / "fine.pth", content)
    read = read_pickle(path, (argparse.Namespace,), checked=True)
    assert read["again"].more == settings.more
    assert load_weights(path).card.backbone == "tiny"


class Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_keeps_silent_when_code_is_refused(tmp_path: Path, zipped: bool) -> None:
    path = saved(tmp_path / "harm.pth", {"x": Harm(tmp_path / "harm")}, zipped)
    errors = io.StringIO()
    with warnings.catch_warnings(record=True) as told, contextlib.redirect_stderr(errors):
        warnings.simplefilter("always")
        with pytest.raises(CodeInPickle, match="could run code") as refused:
            read_pickle(path)
    assert refused.value.what in ("posix.mkdir", "nt.mkdir")
    assert not told
    assert not errors.getvalue()
    assert not (tmp_path / "harm").exists()


def test_a_script_of_torch_is_refused_in_silence(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "script.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RefusedPickle):
            read_pickle(tmp_path / "script.pt")


def rezipped(path: Path, kind: int) -> None:
    with zipfile.ZipFile(path) as archive:
        parts = {part.filename: archive.read(part) for part in archive.infolist()}
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def test_compressed_checkpoints_are_refused(tmp_path: Path) -> None:
    """A thousandth of what comes out of it would be enough."""
    path = saved(tmp_path / "bomb.pth", {"weight": torch.zeros(10**6)})
    rezipped(path, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 10**5
    with pytest.raises(RefusedPickle, match="is compressed"):
        read_pickle(path)


def test_parts_that_lie_in_each_other_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "bomb.pth", {"weight": torch.zeros(1000)})
    content = bytearray(path.read_bytes())
    at = content.find(b"PK\x01\x02")  # of a part in the list at the end
    content[at + 20 : at + 28] = struct.pack("<II", 10**9, 10**9)
    path.write_bytes(content)
    with pytest.raises(RefusedPickle):
        read_pickle(path)


def test_a_single_wrong_bit_is_noticed_where_checked(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.ckpt", {"weight": torch.zeros(1000)})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    assert read_pickle(path)["weight"].count_nonzero() == 1
    with pytest.raises(RefusedPickle, match="is damaged"):
        read_pickle(path, checked=True)


NAMES = [
    "9" * 5000,
    "layer1.0.conv1.weight",
    "٣.0.conv1.weight",
    "encoder.stages." + "1" * 5000 + ".layers.0.layer.0.convolution.weight",
    "\x1b[31m\n<b>",
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:20])
def test_odd_names_of_tensors(tmp_path: Path, name: str) -> None:
    for content in ({name: torch.zeros(3)}, resnet() | {f"resnet.{name}": torch.zeros(3)}):
        with contextlib.suppress(UserError):
            load_weights(saved(tmp_path / "odd.pth", content))


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.float8_e4m3fn, torch.float64])
def test_tensors_of_other_numbers(tmp_path: Path, kind: torch.dtype) -> None:
    content = {name: tensor.to(kind) for name, tensor in resnet().items()}
    assert load_weights(saved(tmp_path / "odd.pth", content)).card.backbone == "tiny"
