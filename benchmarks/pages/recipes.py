"""What recipes, protocols of evaluation and tables there are, from the settings in force."""

from collections import Counter
from collections.abc import Iterable, Mapping

from pages.common import Place
from xmoco.config import Config
from xmoco.evaluate.classify import CROPS_AND_FLIPS, FINETUNE, LINEAR, MOMENTUM, EpochProtocol
from xmoco.evaluate.grid import GRIDS
from xmoco.evaluate.logistic import STRENGTHS
from xmoco.methods import method_class
from xmoco.report.circumstances import markdown_table
from xmoco.settings import load_config, recipe_names
from xmoco.tables.definition import read_table, table_names


def place_of(config: Config) -> tuple[int, bool, int]:
    """Small images first, XMoCo before the others, small batches first."""
    return config.input.size, config.method.name != "xmoco", config.train.batch


def recipes_table(_: Place) -> str:
    """XMoCo's recipes; then a row for every other method, with its recipes for small images and for
    large ones."""
    configs = {name: load_config(name) for name in recipe_names()}
    in_order = sorted(configs, key=lambda name: place_of(configs[name]))
    own = [name for name in in_order if configs[name].method.name == "xmoco"]
    others = {name: config for name, config in configs.items() if name not in own}
    first = [
        [f"`{name}`", f"`{config.data.source}`", images_told(config), *effort(config)]
        for name, config in ((name, configs[name]) for name in own)
    ]
    return "\n\n".join(
        (
            markdown_table(
                ["recipe of XMoCo", "data", "backbone and image size", "epochs", "batch"],
                "lllrr",
                first,
            ),
            recipes_by_method(others),
        )
    )


def images_told(config: Config) -> str:
    enlarged = config.input.eval_size
    judged = "" if enlarged is None else f", evaluated at {enlarged} px"
    return f"`{config.model.backbone}`, {config.input.size} px{judged}"


def effort(config: Config) -> tuple[str, str]:
    return f"{config.train.epochs:,}", f"{config.train.batch:,}"


TITLES = {"mocov1": "MoCo v1"}
"""Of recipes that are not all that their method can do."""
LARGE = "-imagenet"
"""How the names of recipes for large images end."""


def recipes_by_method(configs: Mapping[str, Config]) -> str:
    """What nearly all recipes of a kind share stands above them; the others say what they have."""
    small = {name: config for name, config in configs.items() if not name.endswith(LARGE)}
    large = {name: config for name, config in configs.items() if name.endswith(LARGE)}
    shared = [most_common(map(images_told, some.values())) for some in (small, large)]
    titles = {name: TITLES.get(name, method_class(c.method).title) for name, c in small.items()}
    assert {name + LARGE for name in small} == set(large), "a row has a recipe of either kind"
    rows = []
    for name in sorted(small, key=lambda name: titles[name].lower()):
        row = [titles[name]]
        for recipe, usual in zip((name, name + LARGE), shared, strict=True):
            told = images_told(configs[recipe])
            row.append(f"`{recipe}`" if told == usual else f"`{recipe}` ({told})")
            row.append(" × ".join(effort(configs[recipe])))
        rows.append(row)
    headings = ["other method", "for CIFAR-10", "epochs × batch", "for ImageNet", "epochs × batch"]
    told = f"Those for CIFAR-10 train {shared[0]}; those for ImageNet {shared[1]}, unless noted."
    return f"{markdown_table(headings, 'llrlr', rows)}\n\n{told}"


def most_common(words: Iterable[str]) -> str:
    return Counter(words).most_common(1)[0][0]


def list_of_tables(_: Place) -> str:
    rows = []
    for name in table_names():
        table = read_table(name)
        more = [c.heading for c in table.measured if not c.measure.endswith("_top1")]
        told = ", ".join(more) or "–"
        rows.append([f"`{name}`", table.about, f"`{table.recipe}`", str(table.epochs), told])
    headings = ["table", "rows", "recipe", "epochs", "columns besides accuracy"]
    return markdown_table(headings, "lllrl", rows)


def evaluation_protocols(_: Place) -> str:
    """The hyperparameters of the classifiers that evaluations train."""
    rows = [trained_for_epochs(protocol) for protocol in (*LINEAR.values(), FINETUNE)]
    for grid in GRIDS.values():
        rates, decays = ({getattr(p, name) for p in grid.points} for name in grid.points[0]._fields)
        rows.append(
            [
                f"transfer, end to end (`--grid {grid.name}`)",
                f"{grid.batch}",
                f"one of {len(rates)} from {min(rates):g} to {max(rates):g}",
                f"one of {len(decays)} from {min(decays):g} to {max(decays):g}",
                f"{grid.steps:,} steps",
                "cosine to 0",
            ]
        )
    headings = ["protocol", "batch", "learning rate", "weight decay", "length", "schedule"]
    least, most = (f"{100 * share:g}" for share in CROPS_AND_FLIPS.crop_scale)
    sgd = (
        f"All are trained by SGD with momentum {MOMENTUM:g} (Nesterov's in transfer), on random "
        f"resized crops ({least} to {most} % of the area) and flips. Unlike in "
        "pre-training, learning rates are used as they are, whatever the batch."
    )
    frozen = (
        f"Transfer with frozen features is logistic regression, fitted by L-BFGS with "
        f"{len(STRENGTHS)} strengths of L2 regularisation from {STRENGTHS[0]:,g} to "
        f"{STRENGTHS[-1]:,g}."
    )
    return f"{markdown_table(headings, 'lrrrrl', rows)}\n\n{sgd} {frozen}"


def trained_for_epochs(protocol: EpochProtocol) -> list[str]:
    backbone = "" if protocol.frozen else f", backbone {protocol.backbone_rate:g}"
    return [
        protocol.name,
        f"{protocol.batch}",
        f"{'' if protocol.frozen else 'classifier '}{protocol.head_rate:g}{backbone}",
        f"{protocol.weight_decay:g}",
        f"{protocol.epochs} epochs",
        f"× {protocol.decay:g} after {' and '.join(map(str, protocol.milestones))} epochs",
    ]
