"""Grids: their points, and a file that goes on where it stopped."""

from pathlib import Path

import numpy as np
import pytest

from xmoco.errors import UserError
from xmoco.evaluate.grid import GRIDS, Grid, GridFile, Point

SETTINGS = {"weights": "abc", "rates": (0.1, 0.2), "seed": 0}


def test_the_papers_grid() -> None:
    grid = GRIDS["paper"]
    assert len(grid.points) == len(set(grid.points)) == 110
    assert (grid.steps, grid.batch) == (5000, 64)
    assert np.allclose(np.log10(grid.rates), np.linspace(-4, -1, 10), atol=1e-4)
    assert grid.weight_decays[0] == 0
    assert np.allclose(np.log10(grid.weight_decays[1:]), np.linspace(-6, -3, 10), atol=1e-4)


def test_both_rates_of_a_point_are_its_rate() -> None:
    protocol = Grid("mine", (0.5,), (0.25,), 7, 3).protocol(Point(0.5, 0.25))
    assert (protocol.head_rate, protocol.backbone_rate, protocol.weight_decay) == (0.5, 0.5, 0.25)
    assert (protocol.total_steps(100), protocol.batch, protocol.nesterov) == (7, 3, True)
    assert protocol.name == "transfer, end to end (mine grid)"


def test_finished_points_are_remembered(tmp_path: Path) -> None:
    first = GridFile.open(tmp_path / "new" / "folder", SETTINGS)
    first.add(Point(0.1, 0.0), 50.0)
    first.add(Point(0.2, 0.0), 61.5)
    again = GridFile.open(tmp_path / "new" / "folder", SETTINGS)
    assert again.values == {Point(0.1, 0.0): 50.0, Point(0.2, 0.0): 61.5}
    assert again.best() == (Point(0.2, 0.0), 61.5)


def test_the_result_is_remembered(tmp_path: Path) -> None:
    file = GridFile.open(tmp_path, SETTINGS).add(Point(0.1, 0.0), 50.0)
    assert GridFile.open(tmp_path, SETTINGS).result is None
    file.finish(43.5, unreadable=2)
    again = GridFile.open(tmp_path, SETTINGS)
    assert (again.values, again.result) == ({Point(0.1, 0.0): 50.0}, 43.5)
    assert again.unreadable == 2
    assert again.unreadable == 2


def test_points_have_names_for_their_folders() -> None:
    names = [str(point) for point in GRIDS["paper"].points]
    assert len(set(names)) == 110
    assert str(Point(0.0001, 0.0)) == "rate-0.0001-decay-0"


def test_of_equals_the_gentlest_is_best(tmp_path: Path) -> None:
    file = GridFile.open(tmp_path, SETTINGS)
    for point in (Point(0.2, 0.0), Point(0.1, 0.5), Point(0.1, 0.1), Point(0.3, 0.0)):
        file.add(point, 70.0)
    assert file.best()[0] == Point(0.1, 0.1)


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_line_cut_off_in_writing_is_dropped(tmp_path: Path, cut: int) -> None:
    file = GridFile.open(tmp_path, SETTINGS)
    file.add(Point(0.1, 0.0), 50.0)
    file.add(Point(0.2, 0.0), 60.0)
    file.path.write_bytes(file.path.read_bytes()[:-cut])
    again = GridFile.open(tmp_path, SETTINGS)
    assert again.values == {Point(0.1, 0.0): 50.0}
    again.add(Point(0.2, 0.0), 60.0)
    assert GridFile.open(tmp_path, SETTINGS).values == file.values


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    file = GridFile.open(tmp_path, SETTINGS)
    before = file.path.read_bytes()
    with pytest.raises(UserError, match=r"seed was 0 and is 1 now.*--out"):
        GridFile.open(tmp_path, SETTINGS | {"seed": 1})
    with pytest.raises(UserError, match=r"precision was null and is \"bf16\" now"):
        GridFile.open(tmp_path, SETTINGS | {"precision": "bf16"})
    with pytest.raises(UserError, match=r"seed was 0 and is null now"):
        GridFile.open(tmp_path, {name: SETTINGS[name] for name in ("weights", "rates")})
    assert file.path.read_bytes() == before


VALUE = '{"weights": "abc"}\n{"rate": 1, "weight_decay": 0, "value": "x"}\n'


@pytest.mark.parametrize(
    "content",
    [
        *("no json\n", "[]\n", '{"weights": "abc"}\n{"rate": 1}\n', VALUE),
        *('{"weights": "abc"}\n5\n', '{"weights": "abc"}\n{"result": null}\n'),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "grid.jsonl").write_text(content)
    with pytest.raises(UserError, match="damaged"):
        GridFile.open(tmp_path, SETTINGS)
