"""Tables as yaml files: what is in them, what is planned of them, and what is told of mistakes."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import FAST, assert_done, run_cli
from xmoco.config import KINDS, Config
from xmoco.errors import UserError
from xmoco.pretraining import identity_of, same_identity
from xmoco.settings import config_from_settings, load_config
from xmoco.tables.columns import COLUMNS
from xmoco.tables.definition import Table, read_table, table_names
from xmoco.tables.plan import Asked, plan, trials_of_rows
from xmoco.tables.trials import lasting, own_settings, recipe_digest, unwatched

PAPER = Path(__file__).parents[3] / "shared" / "paper" / "xmoco.tex"

PAPERS = ("main", "main-cifar10", "xi", "bank", "terms", "layers", "batch", "backbones")
"""Tables with figures of the paper."""
CONTENT: dict[str, Any] = {
    "title": "ξ",
    "about": "a few",
    "recipe": "demo",
    "epochs": 3,
    "seeds": [0, 1],
    "columns": ["knn20", "logistic"],
    "paper_columns": [{"heading": "kNN", "beside": "knn20"}],
    "rows": [
        {"name": "0.5", "settings": "positive_mass=0.5", "paper": [42.5]},
        {"name": "0.9", "settings": "positive_mass=0.9", "seeds": [0, 4, 5]},
        {"name": "7", "paper_only": True, "paper": [1.0]},
    ],
}


def table(**changes: Any) -> Table:
    return Table.model_validate(CONTENT | changes)


@pytest.mark.parametrize("name", table_names())
def test_every_row_of_every_table_can_be_trained(name: str) -> None:
    own = read_table(name)
    planned = plan(own, Asked())
    assert {one.row.name for one in planned} == {row.name for row in own.trained}
    assert all(one.trial.config.train.epochs == own.epochs for one in planned)
    rows = [trial.identity for trial in trials_of_rows(own).values()]
    assert all(rows.count(one) == 1 for one in rows), "two rows are the same run"


def test_the_tables_of_the_paper_are_there() -> None:
    assert {*PAPERS, "ideas"} == {*table_names()}
    rows = {name: [row.name for row in read_table(name).trained] for name in table_names()}
    assert rows["xi"] == ["0.5", "0.6", "0.7", "0.8", "0.9", "1.0"]
    assert rows["bank"] == ["512", "1024", "2048", "4096", "8192"]
    assert rows["layers"] == ["2", "3", "4", "5"]
    assert rows["batch"] == ["128", "256", "512", "1024"]
    assert rows["backbones"] == ["ResNet-18", "ResNet-34", "ResNet-50"]
    for name in ("main", "main-cifar10"):
        methods = {one.trial.config.method.name for one in plan(read_table(name), Asked())}
        assert methods == {*KINDS["method"]}
    weights = {(a, b) for a in (0.0, 1.0) for b in (0.0, 1.0)}
    for name, methods in (("terms", {"xmoco"}), ("ideas", {"simclr", "mocov2plus"})):
        found = [one.trial.config.method for one in plan(read_table(name), Asked(seeds=(0,)))]
        assert {(m.name, m.label_weight, m.consistency_weight) for m in found} == {  # type: ignore[union-attr]
            (method, *pair) for method in methods for pair in weights
        }


def numbers_in(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?<![\w.-])\d+(?:\.\d+)?", text)]


@pytest.mark.skipif(not PAPER.exists(), reason="needs the paper")
@pytest.mark.parametrize("name", PAPERS)
def test_figures_are_those_of_the_paper(name: str) -> None:
    """A column's figures follow each other there or, of methods, a row's stand in one line."""
    text = re.sub(r"\\(itabold|textbf|cite\{[^}]*\})|[{}]", " ", PAPER.read_text(encoding="utf-8"))
    own, everything = read_table(name), numbers_in(text)
    rows = [[figure for figure in row.paper if figure is not None] for row in own.rows if row.paper]
    columns = [
        list(column) for column in zip(*(row.paper for row in own.rows if row.paper), strict=True)
    ]

    def follow(figures: list[Any]) -> bool:
        places = range(len(everything))
        return any(everything[place : place + len(figures)] == figures for place in places)

    def stand_in(line: str, figures: list[float]) -> bool:
        found = iter(numbers_in(line))
        return all(figure in found for figure in figures)

    in_lines = all(any(stand_in(line, row) for line in text.splitlines()) for row in rows)
    assert rows
    assert in_lines if own.axis is None and name.startswith("main") else all(map(follow, columns))


def test_rows_take_turns_so_that_every_row_has_a_figure_early() -> None:
    planned = plan(table(), Asked(data="patterns"))
    assert [one.label for one in planned] == [
        *("0.5, seed 0", "0.9, seed 0", "0.5, seed 1", "0.9, seed 4", "0.9, seed 5"),
    ]
    trial = planned[3].trial
    assert (trial.seed, trial.config.train.epochs) == (4, 3)
    assert trial.work == "patterns-tiny-3ep"
    digest = recipe_digest(load_config("demo"))
    told = {"recipe": "demo", "recipe_digest": digest, "changes": "positive_mass=0.9"}
    assert trial.told == told


def test_all_rows_learn_from_the_same_images_whatever_their_recipes() -> None:
    rows = [{"name": "a"}, {"name": "b", "recipe": "byol"}]
    assert load_config("byol").data.source != "patterns"
    for asked, source in ((Asked(), "patterns"), (Asked(overrides=("source=x.tar",)), "x.tar")):
        found = plan(table(rows=rows, columns=["knn20"]), asked)
        assert {one.trial.facts["source"] for one in found} == {source.removesuffix(".tar")}
        data = [one.trial.config.data for one in found]
        assert all(one == data[0] for one in data)
        assert Path(data[0].source).name == source
    rows[0]["settings"] = "source=elsewhere.tar"
    with pytest.raises(UserError, match="row b has other images than row a: all rows of a table"):
        plan(table(rows=rows), Asked())
    assert len(plan(table(rows=rows), Asked(data="patterns"))) == 4


def test_a_table_is_shortened_from_outside() -> None:
    asked = Asked(epochs=1, seeds=(7,), rows=("0.9",), overrides=("batch=32",), held_out=0.1)
    (one,) = plan(table(settings="positive_mass=0.7"), asked)
    config = one.trial.config
    assert (config.train.epochs, config.train.seed, config.train.batch) == (1, 7, 32)
    assert config.method.positive_mass == 0.9  # type: ignore[union-attr]
    assert one.trial.facts["held_out_share"] == 0.1
    assert len(plan(table(), Asked(seeds=(7, 7), rows=("0.9",)))) == 1
    with pytest.raises(UserError, match=r"no row '0\.8' \(did you mean 0\.[59]\?\)"):
        plan(table(), Asked(rows=("0.8",)))
    with pytest.raises(UserError, match=r"train\.epochs = 0"):
        plan(table(), Asked(epochs=0))
    with pytest.raises(UserError, match="one device: give --devices"):
        plan(table(), Asked(overrides=("devices=2",)))


values = st.fixed_dictionaries(
    {},
    optional={
        "method": st.sampled_from(["xmoco", "mocov2plus", "simclr", "byol"]),
        "optim": st.sampled_from(["sgd", "lars"]),
        "batch": st.sampled_from([64, 512]),
        "temperature": st.sampled_from([0.1, 0.2]),
        "hue": st.sampled_from([0.1, 0.2]),
        "weight_decay": st.sampled_from([1e-4, 5e-4]),
        "epochs": st.sampled_from([2, 200]),
        "seed": st.sampled_from([0, 1]),
        "log_every": st.sampled_from([1, 20]),
    },
)


def test_settings_at_their_defaults_do_not_last() -> None:
    """Runs go on, and have their folders, though xmoco has got a new setting since."""
    kept = lasting(load_config(None, ["epochs=7", "history=none", "log_every=3"]))
    assert kept["method"] == {"name": "xmoco", "history": "none"}
    assert (kept["train"], kept["optim"]) == ({"epochs": 7}, {"name": "sgd"})


def test_a_run_is_known_by_all_settings_its_weights_depend_on() -> None:
    """A default that has changed since makes it another run."""

    def identity(*changes: str, source: str = "here") -> dict[str, Any]:
        config = load_config(None, changes, {"source": source})
        return identity_of(unwatched(config), "images")

    assert identity() == identity("log_every=3", "device=cpu", "knn_every=7", source="there")
    assert identity() != identity("temperature=0.3")
    before = identity()
    before["settings"]["method"]["temperature"] = 0.3  # what the default was then
    assert not same_identity(before, identity())
    del before["settings"]["method"]["temperature"]  # it was no setting yet
    assert same_identity(before, identity())


@settings(deadline=None)
@given(values, values)
def test_own_settings_tell_configurations_apart(one: Any, other: Any) -> None:
    """As all settings do, but for epochs and seed, which records tell themselves."""

    def without(config: Config) -> dict[str, Any]:
        kept = config.model_dump(mode="json", exclude={"run", "data", "monitor"})
        for told in ("epochs", "seed", "log_every", "checkpoint_minutes"):
            del kept["train"][told]
        return kept

    configs = []
    for changes in (one, other):
        if changes.get("method") == "byol":
            changes.pop("temperature", None)
        configs.append(load_config(None, settings=changes))
    same = own_settings(configs[0]) == own_settings(configs[1])
    assert same == (without(configs[0]) == without(configs[1]))
    # And they are enough to make the configuration again.
    again = config_from_settings(own_settings(configs[0]))
    assert without(again) == without(configs[0])


def test_a_table_of_ones_own_finds_its_recipe_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "fast.yaml").write_text(yaml.safe_dump(FAST))
    rows = [{"name": "a"}, {"name": "b", "recipe": "demo"}]
    content = CONTENT | {"recipe": "fast.yaml", "rows": rows}
    (folder / "own.yaml").write_text(yaml.safe_dump(content))
    sizes = [
        one.trial.config.input.size
        for one in plan(read_table(str(folder / "own.yaml")), Asked(seeds=(0,)))
    ]
    assert sizes == [16, 32]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rows": []}, "rows"),
        ({"epochs": 0}, "epochs: it must be greater than or equal to 1"),
        ({"columns": ["knn21"]}, r"unknown column 'knn21' \(did you mean knn20\?\)"),
        ({"colums": ["knn20"]}, "unknown key colums"),
        ({"rows": [{"name": "a"}, {"name": "a"}]}, "two rows have the same name"),
        ({"rows": [{"name": "a", "paper": [1.0, 2.0]}]}, "row a has 2 of the paper's figures"),
        ({"columns": ["logistic"]}, "knn20, beside which kNN is, is no column"),
        ({"rows": [{"settings": ""}]}, "lacks rows.0.name"),
        ({"recipe": "dmeo"}, r"unknown recipe 'dmeo' \(did you mean demo\?\)"),
        ({"rows": [{"name": "a", "settings": "epocs=1"}]}, "row a: unknown key 'epocs'"),
    ],
)
def test_mistakes_in_a_file_are_told(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(CONTENT | changes))
    with pytest.raises(UserError, match=sentence):
        plan(read_table(str(file)), Asked())


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the table .*gone\.yaml"):
        read_table(str(tmp_path / "gone.yaml"))
    for text in ("- 1", "3", "a: [", ""):
        (tmp_path / "odd.yaml").write_text(text)
        with pytest.raises(UserError, match=r"odd\.yaml"):
            read_table(str(tmp_path / "odd.yaml"))


def test_the_command_alone_lists_all_tables() -> None:
    outcome = run_cli("tables")
    assert_done(outcome)
    words = " ".join(outcome.stdout.split())
    for name in table_names():
        assert f"{name} {read_table(name).about}" in words


def test_columns_are_told_apart() -> None:
    kinds = {(column.measure, column.k) for column in COLUMNS.values()}
    assert len(kinds) == len(COLUMNS)
