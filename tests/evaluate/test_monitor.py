"""The kNN monitor: what it measures, on which images, and what its records say."""

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from xmoco.data import ArrayImages, ImageSet, UnreadableImage
from xmoco.data.subset import some_positions
from xmoco.data.views import ViewGroup
from xmoco.evaluate.monitor import Monitor
from xmoco.report import pictures
from xmoco.settings import load_config

CONFIG = load_config("demo", ["size=8", "knn_k=3", "device=cpu"])


class Flat(nn.Module):
    """Features are the mean colours."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3))


def coloured(each: int, seed: int, labelled: bool = True) -> ArrayImages:
    """Three classes, each with a colour of its own and a little noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(3).repeat(each)
    noise = torch.randint(40, (3 * each, 3, 8, 8), generator=generator)
    pixels = (200 * nn.functional.one_hot(labels, 3)[:, :, None, None] + noise).to(torch.uint8)
    classes = ("red", "green", "blue")
    return ArrayImages("colours", pixels, *((labels, classes) if labelled else ()))


def monitor(train: ImageSet, test: ImageSet | None) -> Monitor:
    return Monitor(CONFIG, "colours-tiny-1ep", train, test, torch.device("cpu"))


def test_records_of_all_three_subjects() -> None:
    judge = monitor(coloured(6, 0), coloured(4, 1))
    backbone = Flat()
    records = [judge.raw_pixels(), judge.initial(backbone), judge.trained(backbone, 4, 40)]
    assert [record.subject for record in records] == ["raw pixels", "untrained", "xmoco"]
    assert [record.value for record in records] == [100, 100, 100]
    assert [record.protocol["features"] for record in records] == ["pixels", "backbone", "backbone"]
    assert [record.protocol["epoch"] for record in records] == [0, 0, 4]
    for record in records:
        assert (record.measure, record.unit, record.work) == ("knn_top1", "%", "colours-tiny-1ep")
        protocol = record.protocol
        assert (protocol["data"], protocol["split"], protocol["k"]) == ("colours", "test", 3)
        assert (protocol["bank_images"], protocol["judged_images"]) == (18, 12)
        assert (protocol["size"], protocol["temperature"]) == (8, 0.1)
        assert protocol["voters"] == 3


def test_images_are_judged_at_the_size_that_was_asked_for() -> None:
    class Watching(Flat):
        sides: ClassVar[set[int]] = set()

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            self.sides.add(images.shape[-1])
            return super().forward(images)

    config = CONFIG.model_copy(update={"input": CONFIG.input.model_copy(update={"eval_size": 12})})
    judge = Monitor(config, "colours", coloured(6, 0), coloured(4, 1), torch.device("cpu"))
    assert judge.initial(Watching()).protocol["size"] == 12
    assert Watching.sides == {12}


def test_neighbours_are_looked_up_in_what_judged_the_last_epoch() -> None:
    judge, backbone = monitor(coloured(6, 0), coloured(4, 1)), Flat()
    expected = judge.neighbours(backbone, 3, 2)
    last = CONFIG.train.epochs
    judge.trained(nn.Flatten(), last - 1, 0)  # no epoch before counts
    assert all(map(torch.equal, judge.neighbours(backbone, 3, 2), expected))
    judge.trained(backbone, last, 0)
    assert all(map(torch.equal, judge.neighbours(nn.Flatten(), 3, 2), expected))


def test_wrong_labels_are_noticed() -> None:
    test = coloured(4, 1)
    assert test.labels is not None
    test.labels[:3] = torch.tensor([1, 2, 0])
    assert monitor(coloured(6, 0), test).initial(Flat()).value == 75


def test_judging_needs_labels_on_both_sides() -> None:
    labelled, bare = coloured(3, 0), coloured(3, 1, labelled=False)
    assert monitor(labelled, None).possible
    assert monitor(labelled, labelled).possible
    assert not monitor(bare, None).possible
    assert not monitor(labelled, bare).possible
    assert not monitor(bare, labelled).possible


def test_judging_needs_one_label_for_each_image() -> None:
    labelled, several = coloured(3, 0), coloured(3, 1)
    assert several.labels is not None
    several.labels = nn.functional.one_hot(several.labels, 3).bool()
    assert not monitor(several, None).possible
    assert not monitor(labelled, several).possible
    assert not monitor(several, labelled).possible


def test_leave_one_out_without_a_test_split() -> None:
    record = monitor(coloured(6, 0), None).initial(Flat())
    assert record.protocol["split"] == "leave one out"
    assert record.protocol["judged_images"] == 18
    few = monitor(coloured(1, 0), None).initial(Flat())
    assert (few.protocol["k"], few.protocol["voters"]) == (3, 2)
    assert record.value == 100


def test_neighbours_for_a_picture() -> None:
    train, test = coloured(6, 0), coloured(4, 1)
    asked, positions, similarities = monitor(train, test).neighbours(Flat(), queries=5, k=4)
    assert positions.shape == similarities.shape == (5, 4)
    assert train.labels is not None
    assert test.labels is not None
    assert (train.labels[positions] == test.labels[asked][:, None]).all()
    assert (similarities.diff(dim=1) <= 0).all()
    asked, positions, _ = monitor(train, None).neighbours(Flat(), queries=5, k=4)
    assert not (positions == asked[:, None]).any()  # no image is its own neighbour


class Streamed(ImageSet):
    """120 images in two classes of one colour each; the last of the first class is broken."""

    name = "streamed"
    labels = torch.arange(2).repeat_interleave(60)
    classes = ("dark", "bright")

    def __len__(self) -> int:
        return 120

    def read(self, index: int) -> torch.Tensor:
        if index == 59:
            raise UnreadableImage("broken")
        colour = torch.tensor([250, 20] if index < 60 else [20, 250])[[0, 1, 1]]
        return colour[:, None, None].expand(3, 8, 8).to(torch.uint8)

    def where(self, index: int) -> str:
        return str(index)


def test_a_replaced_image_is_judged_and_pictured_with_its_own_label(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge = monitor(Streamed(), None)
    assert judge.initial(Flat()).value == judge.raw_pixels().value == 100

    sheet: dict[str, torch.Tensor] = {}

    def keep(queries: torch.Tensor, neighbours: torch.Tensor, _: object, **rest: Any) -> bytes:
        sheet.update(rest, queries=queries, neighbours=neighbours)
        return b""

    def all_with_broken_ones(*_: object) -> tuple[torch.Tensor, torch.Tensor, None]:
        return torch.tensor([0, 59, 119]), torch.tensor([[1, 59], [59, 60], [59, 0]]), None

    monkeypatch.setattr(pictures, "neighbours_sheet", keep)
    monkeypatch.setattr(Monitor, "neighbours", all_with_broken_ones)
    assert pictures.picture_neighbours(judge, Flat()) == b""
    assert sheet["query_labels"].tolist() == [0, 1, 1]
    assert sheet["neighbour_labels"].tolist() == [[0, 1], [1, 1], [1, 0]]
    for kind, labels in (("queries", "query_labels"), ("neighbours", "neighbour_labels")):
        bright = sheet[kind][..., 0, 0, 0] < 100
        assert torch.equal(bright, sheet[labels] == 1)


def test_a_broken_image_among_those_pictured_does_no_harm() -> None:
    class BrokenFirst(Streamed):
        def read(self, index: int) -> torch.Tensor:
            if index == int(some_positions(120, 8)[0]):
                raise UnreadableImage("broken")
            return torch.zeros(3, 8, 8, dtype=torch.uint8)

    groups = [ViewGroup(("one view", "another"), CONFIG.views, CONFIG.input)]
    picture = pictures.picture_views(BrokenFirst(), groups, 0, torch.device("cpu"))
    assert picture.startswith(b"\x89PNG")
