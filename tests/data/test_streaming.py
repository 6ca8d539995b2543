"""Canvas, replacement of unreadable images, threads, and the GPU's way from files to batches."""

import subprocess
import sys
import tarfile
import time
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from listed import (
    CPU,
    Listed,
    assert_same,
    batches_of,
    first,
    many_sizes,
    reading_threads,
    same_size,
    with_broken,
)
from photographs import damaged, encoded, photograph, plain
from torch import Tensor

from xmoco.config import DataConfig
from xmoco.data.batches import Batch, Batches, at_positions, epoch_order, in_order, preload
from xmoco.data.decode import UnreadableImage
from xmoco.data.file_readers import FileReaders
from xmoco.data.imagesets import EncodedImages, ImageSet, RaggedImages
from xmoco.data.preload import LOOKED_AT
from xmoco.data.sources import open_images
from xmoco.data.streaming import GREY
from xmoco.data.subset import joined, taken
from xmoco.data.unreadable import Unreadable
from xmoco.errors import UserError

CUDA = torch.device("cuda")
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")


def test_differing_sizes_share_a_canvas_of_zeros() -> None:
    pictures = many_sizes(30)
    for batch in first(batches_of(Listed(pictures), 10), 4):
        largest = batch.sizes.amax(0).tolist()
        assert batch.images.shape == (10, 3, *largest)
        for image, (height, width), index in zip(
            batch.images, batch.sizes.tolist(), batch.indices.tolist(), strict=True
        ):
            picture = pictures[index]
            assert picture is not None
            assert torch.equal(image[:, :height, :width], picture)
            assert image.count_nonzero() == picture.count_nonzero()


def next_readable(index: int, count: int, broken: set[int]) -> int:
    while index in broken:
        index = (index + 1) % count
    return index


@pytest.mark.parametrize("gib", [0.0, 4.0])
def test_unreadable_images_are_replaced_by_the_next(gib: float) -> None:
    broken = {10, 11, 249, 0, 499}
    images = Listed(with_broken(500, broken))
    batches = batches_of(images, 50, preload_gib=gib)
    seen = first(batches, batches.steps_per_epoch)
    wanted = epoch_order(500, 7, 0).tolist()
    expected = [next_readable(index, 500, broken) for index in wanted]
    assert torch.cat([batch.indices for batch in seen]).tolist() == expected
    for batch in seen:
        assert (batch.images[:, 0, 0, 0] == batch.indices % 256).all()
        assert batch.labels is not None
        assert torch.equal(batch.labels, batch.indices)  # as Listed has them
    assert {where for where, _ in batches.unreadable} == {f"picture {i}" for i in broken}
    assert {why for _, why in batches.unreadable} == {"broken"}
    assert len(batches.unreadable) == 5


def test_streaming_notes_unreadable_images_when_it_meets_them() -> None:
    images = Listed(with_broken(300, {5, 150}))
    batches = batches_of(images, 10, preload_gib=0.0, readers=4)
    position = {index: place for place, index in enumerate(epoch_order(300, 7, 0).tolist())}
    soonest = min((5, 150), key=lambda index: position[index])
    steps = batches.from_step(0)
    for _ in range(position[soonest] // 10):
        next(steps)
    assert len(batches.unreadable) == 0
    next(steps)
    assert next(iter(batches.unreadable)) == (f"picture {soonest}", "broken")


@pytest.mark.parametrize("gib", [0.0, 4.0])
@pytest.mark.parametrize("broken", [set(range(5)), set(range(0, 400, 80)), set(range(400))])
def test_more_than_one_percent_unreadable_is_an_error(gib: float, broken: set[int]) -> None:
    images = Listed(with_broken(400, broken))
    examples = r"(picture \d+ \(broken\)(, | and \d+ more|)){5,11}"
    sentence = rf"^at least \d+ of 400 images cannot .* 1 %: {examples}\.$"
    with pytest.raises(UserError, match=sentence):
        first(batches_of(images, 200, preload_gib=gib), 2)


def test_what_is_met_together_is_named_together() -> None:
    images = Listed(with_broken(40, set(range(0, 40, 3))))
    with pytest.raises(UserError) as error:
        list(in_order(images, 20, CPU))
    named = ", ".join(f"picture {number} (broken)" for number in range(0, 21, 3))
    words = "at least 7 of 40 images cannot be read, which is more than the 3 that may be"
    assert str(error.value) == f"{words}: {named}."
    with pytest.raises(UserError, match=r"picture 27 \(broken\) and 4 more\.$"):
        list(in_order(images, 40, CPU))


@pytest.mark.parametrize(
    ("images", "limit"),
    [(1, 0), (3, 0), (4, 1), (11, 2), (12, 3), (399, 3), (400, 4), (10**6, 10**4)],
)
def test_how_many_may_be_unreadable(images: int, limit: int) -> None:
    assert Unreadable(images).limit == limit


def test_errors_of_the_program_are_not_taken_for_broken_images() -> None:
    class Faulty(Listed):
        def read(self, index: int) -> Tensor:
            raise ZeroDivisionError(index)

    with pytest.raises(ZeroDivisionError):
        list(in_order(Faulty(same_size(10)), 5, CPU))


def test_the_limit_counts_each_image_once_and_those_known_before() -> None:
    unreadable = Unreadable(8, [("a", "x")])
    for _ in range(5):
        unreadable.add("a", "y")
        unreadable.add("b", "z")
    assert list(unreadable) == [("a", "x"), ("b", "z")]
    with pytest.raises(UserError, match=r"3 of 8 .*: a \(x\), b \(z\), c \(w\)\.$"):
        unreadable.add("c", "w")


def test_what_will_be_left_out_is_not_replaced() -> None:
    """However many follow each other, each is tried by itself: twice, to learn why."""
    images = Listed(with_broken(120, set(range(119))))
    unreadable = Unreadable(120, left_out=True)
    batches = list(in_order(images, 50, CPU, unreadable=unreadable))
    assert torch.cat([batch.indices for batch in batches]).tolist() == list(range(120))
    assert list(unreadable) == [(f"picture {index}", "broken") for index in range(119)]
    assert images.reads == 2 * 119 + 1
    *_, last = batches
    assert last.sizes.tolist() == [[8, 8]] * 19 + [[4, 5]]
    assert torch.equal(last.images[0], GREY)
    assert (last.images[-1, :, :4, :5] == 119).all()


# Threads


def test_closing_stops_the_threads_promptly() -> None:
    images = Listed(same_size(400), delay=0.005)
    steps = batches_of(images, 100, preload_gib=0.0, readers=2).from_step(0)
    next(steps)
    assert reading_threads()
    steps.close()
    assert not reading_threads()
    assert images.reads < 300  # of the 400 that were asked for


def test_an_error_or_a_dropped_iterator_stops_the_threads() -> None:
    images = Listed(with_broken(200, set(range(100))))
    with pytest.raises(UserError):
        first(batches_of(images, 50, preload_gib=0.0), 4)
    assert not reading_threads()
    next(batches_of(Listed(same_size(50)), preload_gib=0.0).from_step(0))
    assert not reading_threads()


def test_reading_ahead_is_bounded() -> None:
    images = Listed(same_size(1000))
    batches = batches_of(images, 10, preload_gib=0.0)
    steps = batches.from_step(0)
    for consumed in range(1, 6):
        next(steps)
        time.sleep(0.05)
        assert images.reads <= LOOKED_AT + 10 * (consumed + 4)
    steps.close()


def test_the_interpreter_exits_while_batches_are_being_read() -> None:
    program = """
import time, torch
from xmoco.data import Batches, ImageSet
class Slow(ImageSet):
    name, labels, classes = "slow", None, None
    def __len__(self): return 1000
    def read(self, index):
        time.sleep(0.01)
        return torch.zeros(3, 8, 8, dtype=torch.uint8)
    def where(self, index): return str(index)
batches = Batches(Slow(), batch=100, seed=0, device=torch.device("cpu"), preload_gib=0)
steps = batches.from_step(0)
next(steps)
print(time.time(), flush=True)
raise KeyboardInterrupt
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stderr.strip().endswith("KeyboardInterrupt")
    assert time.time() - float(ended.stdout) < 10


# From files to batches by the GPU, for which there may be a stand-in


def write_mixture(folder: Path, count: int = 120, broken: int = 1) -> Path:
    """JPEG files of several sizes, every third of another kind; ``broken`` ones among them."""
    others: list[dict[str, Any]] = [
        {"kind": "PNG"},
        {"progressive": True},
        {"keep_rgb": True},
        {"kind": "WEBP", "lossless": True},
    ]
    for index in range(count):
        size = [(40, 30), (30, 40), (24, 24)][index % 7 % 3]
        image = photograph(*size, seed=index)
        if index % 3 == 2:
            data = encoded(image, **others[index // 3 % 4])
        elif index % 5 == 0:
            data = encoded(image.convert("L"))
        else:
            data = encoded(image, subsampling=index % 2)
        if index in range(10, 10 + broken):
            data = encoded(photograph())[: [-40, -5][index % 2]]
        (folder / f"{index:03}.img.jpg").write_bytes(data)
    return folder


def opened(folder: Path) -> EncodedImages:
    images = open_images(DataConfig(source=str(folder), short_side=32), "train")
    assert isinstance(images, EncodedImages)
    return images


def assert_alike(one: Batch, other: Batch, mean: float) -> None:
    """Same images, and pixels that differ by so much at most on average."""
    assert torch.equal(one.sizes, other.sizes)
    assert torch.equal(one.indices, other.indices)
    difference = (one.images.cpu().float() - other.images.cpu().float()).abs()
    assert difference.mean() <= mean


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list["subprocess.Popen[bytes]"]:
    """Processes, which decode for sets as small as these."""
    processes: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **o: processes.append(popen(*a, **o)) or processes[-1]
    )
    monkeypatch.setattr("xmoco.data.decoders.WORTH_STARTING", 0)
    return processes


@pytest.mark.parametrize("processes", [True, False])
def test_the_gpus_way_gives_the_threads_batches(
    stand_in: SimpleNamespace,
    started: list["subprocess.Popen[bytes]"],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    processes: bool,
) -> None:
    """Whether processes read the files for the threads, and decode some, or not."""
    read = Mock(side_effect=FileReaders.read)
    monkeypatch.setattr(FileReaders, "read", lambda *arguments: read(*arguments))
    monkeypatch.setattr("xmoco.data.processes.POSSIBLE", processes)
    images = opened(write_mixture(tmp_path))
    by_gpu = list(in_order(images, 50, CPU, readers=3))
    assert (read.call_count > 0) == processes
    assert 2 * processes <= len(started) <= 6 * processes
    assert all(process.poll() == 0 for process in started)  # they ended with the last batch
    assert sum(stand_in.calls) == 1 + 79  # one in advance; two thirds are plain, but one is cut off
    monkeypatch.undo()
    by_threads = list(in_order(images, 50, CPU, readers=3))
    assert len(by_gpu) == len(by_threads) == 3
    for one, other in zip(by_gpu, by_threads, strict=True):
        assert_alike(one, other, mean=0.2)


def write_others(folder: Path, count: int, broken: set[int]) -> Path:
    """Files that are no plain JPEG, some cut off."""
    for index in range(count):
        image = photograph(20 + index % 5, 24, seed=index)
        kind: dict[str, Any] = {"kind": "PNG"} if index % 2 else {"progressive": True}
        data = encoded(image, **kind)
        (folder / f"{index:03}.png").write_bytes(data[:-60] if index in broken else data)
    return folder


@pytest.mark.parametrize("archive", [False, True])
def test_what_processes_decode_is_the_same_to_the_bit(
    stand_in: SimpleNamespace,
    started: list["subprocess.Popen[bytes]"],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    archive: bool,
) -> None:
    """And so is what is told of unreadable images, and who takes their places."""
    folder = tmp_path / "images"
    folder.mkdir()
    write_others(folder, 300, broken={7, 8, 299})
    if archive:
        with tarfile.open(tmp_path / "images.tar", "w") as file:
            file.add(folder, "images")
    images = opened(tmp_path / "images.tar" if archive else folder)
    there, here = Unreadable(300), Unreadable(300)
    by_processes = list(in_order(images, 70, CPU, readers=2, unreadable=there))
    assert started
    assert sum(stand_in.calls) == 1
    monkeypatch.undo()
    assert_same(by_processes, list(in_order(images, 70, CPU, readers=2, unreadable=here)))
    assert list(there) == list(here)
    assert len(there) == 3


def test_large_images_are_shrunk_alike(stand_in: SimpleNamespace, tmp_path: Path) -> None:
    for index, kind in enumerate(("JPEG", "PNG", "JPEG")):
        data = encoded(photograph(100, 80 + index, seed=index), kind=kind)
        (tmp_path / f"{index}.img.jpg").write_bytes(data)
    images = opened(tmp_path)
    (batch,) = in_order(images, 3, CPU)
    assert batch.sizes.tolist() == [list(images.read(index).shape[1:]) for index in range(3)]
    assert batch.sizes.amin(1).tolist() == [32] * 3


def test_files_and_others_share_a_batch(stand_in: SimpleNamespace, tmp_path: Path) -> None:
    """Those of an archive are nowhere on disk."""
    folder = tmp_path / "folder"
    folder.mkdir()
    images = opened(write_mixture(folder, 12, broken=0))
    with tarfile.open(tmp_path / "archive.tar", "w") as archive:
        archive.add(folder, "folder")
    both = joined(images, opened(tmp_path / "archive.tar"))
    order = torch.tensor([0, 12, 1, 13, 14, 2, 23, 11])
    batch = at_positions(both, order, CPU)
    for place, position in enumerate((order % 12).tolist()):
        high, wide = batch.sizes[place].tolist()
        wanted = at_positions(images, torch.tensor([position]), CPU).images[0]
        assert torch.equal(batch.images[place, :, :high, :wide], wanted)


def test_a_file_that_vanishes_is_replaced_by_the_next(
    stand_in: SimpleNamespace, tmp_path: Path
) -> None:
    images = opened(write_mixture(tmp_path, 120, broken=0))
    (tmp_path / "030.img.jpg").unlink()
    unreadable = Unreadable(120)
    (batch,) = in_order(images, 120, CPU, unreadable=unreadable)
    assert batch.indices.tolist() == [*range(30), 31, *range(31, 120)]
    ((where, why),) = unreadable
    assert (Path(where).name, why) == ("030.img.jpg", "No such file or directory")


def test_damage_found_by_the_gpu_is_treated_as_any_other(
    stand_in: SimpleNamespace, tmp_path: Path
) -> None:
    write_mixture(tmp_path, 210, broken=0)
    assert plain(damaged()).width == 40
    for index in (18, 19):
        (tmp_path / f"{index:03}.img.jpg").write_bytes(damaged())
    images = opened(tmp_path)
    batches = Batches(images, batch=70, seed=0, device=CPU, preload_gib=0.0)
    seen = list(islice(batches.from_step(0), 3))
    indices = torch.cat([batch.indices for batch in seen]).sort().values
    assert indices.tolist() == [*range(18), 20, 20, *range(20, 210)]
    assert {Path(where).name for where, _ in batches.unreadable} == {"018.img.jpg", "019.img.jpg"}
    with pytest.raises(UnreadableImage) as caught:
        images.read(18)
    assert {why for _, why in batches.unreadable} == {str(caught.value)}


def test_too_much_damage_is_an_error(stand_in: SimpleNamespace, tmp_path: Path) -> None:
    for index in range(20):
        (tmp_path / f"{index:03}.jpg").write_bytes(damaged())
    with pytest.raises(UserError, match=r"^at least 13 of 20 images cannot be read"):
        list(in_order(opened(tmp_path), 10, CPU))


def test_the_gpus_way_replaces_nothing_that_will_be_left_out(
    stand_in: SimpleNamespace, tmp_path: Path
) -> None:
    """Neither files that no header tells to be damaged, nor those that are no images at all."""
    contents = [damaged()] * 5 + [b""] * 5 + [encoded(photograph())]
    for index, content in enumerate(contents):
        (tmp_path / f"{index:03}.jpg").write_bytes(content)
    unreadable = Unreadable(11, left_out=True)
    (batch,) = in_order(opened(tmp_path), 11, CPU, unreadable=unreadable)
    assert batch.indices.tolist() == list(range(11))
    assert len(unreadable) == 10
    assert all(torch.equal(image[:, :8, :8], GREY) for image in batch.images[:10])


def test_without_nvjpeg_the_threads_decode(
    stand_in: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        stand_in.calls.append(1)
        raise RuntimeError("torchvision not compiled with nvJPEG support")

    monkeypatch.setattr("torchvision.io.decode_jpeg", fail)
    images = opened(write_mixture(tmp_path, 12, broken=0))
    (batch,) = in_order(images, 12, CPU)
    assert stand_in.calls == [1]
    for index in range(12):
        high, wide = batch.sizes[index].tolist()
        assert torch.equal(batch.images[index, :, :high, :wide], images.read(index))


def test_parts_of_sets_pass_their_files_on(stand_in: SimpleNamespace, tmp_path: Path) -> None:
    images = opened(write_mixture(tmp_path, 12, broken=0))
    part = taken(images, torch.tensor([3, 0, 4]))
    both = joined(part, images)
    stand_in.calls.clear()
    assert at_positions(both, torch.arange(15), CPU).indices.tolist() == list(range(15))
    assert sum(stand_in.calls) == 1 + 3 + 8


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("readers", [1, 5])
def test_batches_on_a_gpu(tmp_path: Path, readers: int) -> None:
    images = opened(write_mixture(tmp_path))
    on_gpu = list(in_order(images, 50, CUDA, readers=readers))
    assert_same(on_gpu, list(in_order(images, 50, CUDA, readers=8)))
    for one, host in zip(on_gpu, in_order(images, 50, CPU), strict=True):
        assert one.images.is_cuda
        assert_alike(one, host, mean=3)  # such small pictures have steep colours


@pytest.mark.gpu
def test_what_processes_decode_is_the_same_to_the_bit_on_a_gpu(
    started: list["subprocess.Popen[bytes]"], tmp_path: Path
) -> None:
    images = opened(write_others(tmp_path, 300, broken={7, 8, 299}))
    for _ in range(3):  # memory of the batches before is used again
        on_gpu = list(in_order(images, 70, CUDA, readers=4))
        assert all(batch.images.is_cuda for batch in on_gpu)
        brought = [replace(batch, images=batch.images.cpu()) for batch in on_gpu]
        assert_same(brought, list(in_order(images, 70, CPU)))
    assert started


@pytest.mark.gpu
@pytest.mark.parametrize("small", [True, False])
def test_resident_batches_on_a_gpu_equal_streamed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """To the bit: small files are decoded as on a CPU, others as by streaming."""
    monkeypatch.setattr("xmoco.data.preload.SMALL", 2**30 if small else 0)
    images = opened(write_mixture(tmp_path))
    kept = preload(images, CUDA)
    assert isinstance(kept, RaggedImages)
    assert kept.pictures[0].is_cuda
    held = list(in_order(kept, 50, CUDA))
    if small:
        held = [replace(batch, images=batch.images.cpu()) for batch in held]
    assert_same(held, list(in_order(images, 50, CPU if small else CUDA)))


@pytest.mark.gpu
def test_truncated_and_damaged_files_on_a_gpu(tmp_path: Path) -> None:
    write_mixture(tmp_path, 300, broken=2)
    (tmp_path / "050.img.jpg").write_bytes(damaged())
    images = opened(tmp_path)
    indices = torch.cat([batch.indices for batch in in_order(images, 100, CUDA)]).tolist()
    assert indices.pop(50) in (50, 51)  # the GPU may know how to take it
    assert indices == [*range(10), 12, 12, *range(12, 50), *range(51, 300)]


@pytest.mark.gpu
def test_the_consumer_never_waits_for_the_device(tmp_path: Path) -> None:
    """While its own stream is busy for long, batches keep coming."""
    for index in range(120):  # all alike: where batches differ, nvJPEG may want other memory
        (tmp_path / f"{index:03}.jpg").write_bytes(encoded(photograph(seed=index)))
    images = opened(tmp_path)
    for source in (images, preload(images, CUDA)):
        batches = Batches(source, batch=40, seed=0, device=CUDA, preload_gib=0.0)
        with closing(batches.from_step(0)) as stream:
            started = time.perf_counter()
            list(islice(stream, 10))  # so that there is memory enough for what follows
            torch.cuda.synchronize()
            usual = time.perf_counter() - started  # longer where others use the machine too
            torch.cuda._sleep(round(2e9 * max(4, 5 * usual)))  # that many seconds, about
            for _ in range(10):
                next(stream)
            assert not torch.cuda.current_stream().query()


@pytest.mark.gpu
def test_batches_stay_whole_while_others_are_decoded(tmp_path: Path) -> None:
    """Memory must not be reused while the consumer's stream still has to read it."""
    images = opened(write_mixture(tmp_path, broken=0))
    expected = [batch.images.double().sum().item() for batch in in_order(images, 20, CUDA)]
    for _ in range(5):
        sums = []
        for batch in in_order(images, 20, CUDA):
            torch.cuda._sleep(20_000_000)
            sums.append(batch.images.double().sum())
            del batch
        assert [total.item() for total in sums] == expected


class Slow(ImageSet):
    """A hundred images, which take a second to read."""

    name, labels, classes = "slow", None, None

    def __len__(self) -> int:
        return 100

    def read(self, index: int) -> Tensor:
        time.sleep(0.01)
        return torch.full((3, 8, 8), index, dtype=torch.uint8)

    def where(self, index: int) -> str:
        return str(index)


@pytest.mark.gpu
@pytest.mark.parametrize("busy", [False, True])
def test_waiting_is_the_devices_not_the_hosts(busy: bool) -> None:
    batches = Batches(Slow(), batch=25, seed=0, device=CUDA, readers=1, preload_gib=0.0)
    with closing(batches.from_step(0)) as stream:
        list(islice(stream, 8))  # so that there is memory enough for what follows
        torch.cuda.synchronize()
        before = batches.waited
        if busy:
            torch.cuda._sleep(6_000_000_000)  # about 3 seconds
        for _ in range(4):
            next(stream)
        torch.cuda.synchronize()
        idle = batches.waited - before
    assert (idle < 0.2) if busy else (0.6 < idle < 2)
