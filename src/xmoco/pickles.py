"""What ``torch.save`` wrote, read without running anything and without believing it.

A file may come from anyone, or be damaged. Only tensors and plain values are unpickled
(``weights_only``); what is compressed, and so could be any amount, is refused, and so is what
refers to itself or holds tensors that are not simply numbers in memory.
"""

import argparse
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MOST_PARTS = 10**6
"""Tensors, lists and dictionaries, each counted in every place where it stands."""
DEEPEST = 100
"""Lists and dictionaries inside each other."""

DAMAGED = "is damaged or no checkpoint of PyTorch"
NO_CHECKPOINT = "is incomplete or no checkpoint at all"

Harmless = Callable[..., object] | tuple[Callable[..., object], str]


class RefusedPickle(Exception):  # noqa: N818
    """What is wrong with a file, to be said after its name: "is damaged"."""


class CodeInPickle(RefusedPickle):
    """The file asks for more than tensors and plain values; ``what``, if that is known."""

    def __init__(self, what: str | None) -> None:
        named = f" ({what})" if what else ""
        super().__init__(
            f"holds more than tensors and plain values{named}, so loading it could run code; it "
            "was refused"
        )
        self.what = what


def read_pickle(path: Path, harmless: Iterable[Harmless] = (), checked: bool = False) -> Any:
    """The content of a file, all tensors on the CPU; raises ``RefusedPickle`` or an ``OSError``.

    ``harmless`` are functions and classes that may be called; ``checked`` compares every part with
    its checksum first.
    """
    check_parts(path, checked)
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(list(harmless)):
            warnings.simplefilter("ignore")  # what torch thinks of a file, we say ourselves
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # damaged bytes can raise anything
        code = re.search(r"GLOBAL (\S*\w) ", str(error))
        if isinstance(error, pickle.UnpicklingError) and (code or checked):
            raise CodeInPickle(code[1] if code else None) from None
        raise RefusedPickle(DAMAGED) from None
    _check_content(content)
    return content


def check_parts(path: Path, checked: bool) -> None:
    """Look at the archive that torch writes, which stores parts as they are, one behind the other:
    raises ``RefusedPickle`` or an ``OSError``. Where ``checked``, parts must have their checksums;
    otherwise it may also be a file from before there were archives."""
    with path.open("rb") as file:
        archived = file.read(2) == b"PK"
    if not archived and checked:
        raise RefusedPickle(NO_CHECKPOINT)
    if archived:
        _check_archive(path, checked)


def _check_archive(path: Path, checked: bool) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
            if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
                raise RefusedPickle("is compressed, as no checkpoint of PyTorch is")
            if sum(part.file_size for part in parts) > path.stat().st_size:
                raise RefusedPickle("is damaged: it tells of more than it holds")
            if checked and archive.testzip() is not None:
                raise RefusedPickle("is damaged")
    except RefusedPickle:
        raise
    except OSError:
        raise
    except Exception:  # a damaged archive, too, can raise anything
        raise RefusedPickle(NO_CHECKPOINT if checked else DAMAGED) from None


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | set):
        return value
    return vars(value).values() if isinstance(value, argparse.Namespace) else ()


def _check_content(content: object) -> None:
    """Bounds what anyone who walks through it will meet; walks without recursion itself."""
    measured: dict[int, tuple[int, int]] = {}  # depth and number of parts
    under_way = {id(content)}
    _check_tensor(content)
    path = [(content, iter(list(_parts(content))), [0, 1])]
    while path:
        value, rest, (depth, count) = path[-1]
        child = next(rest, path)  # which is no part of anything
        if child is path:
            path.pop()
            under_way.discard(id(value))
            measured[id(value)] = depth + 1, count
            if path:
                _add(path[-1][2], measured[id(value)])
        elif id(child) in under_way:
            raise RefusedPickle("refers to itself, and was refused")
        elif id(child) in measured:
            _add(path[-1][2], measured[id(child)])
        elif isinstance(child, Tensor):
            _check_tensor(child)
            _add(path[-1][2], (1, 1))
        elif isinstance(child, Mapping | list | tuple | set | argparse.Namespace):
            under_way.add(id(child))
            path.append((child, iter(list(_parts(child))), [0, 1]))
            if len(path) > DEEPEST:
                raise RefusedPickle("is nested too deeply, and was refused")


def _add(total: list[int], part: tuple[int, int]) -> None:
    total[0], total[1] = max(total[0], part[0]), total[1] + part[1]
    if total[0] > DEEPEST or total[1] > MOST_PARTS:
        raise RefusedPickle("is nested too deeply, and was refused")


def _check_tensor(value: object) -> None:
    if not isinstance(value, Tensor):
        return
    usual = (
        value.layout == torch.strided
        and value.device.type == "cpu"
        and not (value.is_quantized or value.is_complex() or value.is_nested)
    )
    # An expanded tensor tells of more numbers than there are.
    if not usual or value.nbytes > value.untyped_storage().nbytes():
        raise RefusedPickle(
            "holds a tensor that is not simply numbers in memory (but sparse, quantised, complex "
            "or without content), and was refused"
        )
