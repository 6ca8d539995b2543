"""What is drawn of a history, panel by panel, and what each means.

Methods differ in what they log, so a panel is made for whatever is there: kNN beside its baselines,
the loss and its terms, and one for every other value. Each panel has labelled axes and a scale that
does not flatter: percentages run from 0 to 100, probabilities from 0 to 1, amounts from zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from xmoco.report.history import History, Series


@dataclass(frozen=True)
class Panel:
    """One plot: curves, constant levels to compare them with, and what the scale must include."""

    title: str
    unit: str
    curves: Mapping[str, Series]
    levels: Mapping[str, float] = field(default_factory=dict)
    includes: Sequence[float] = ()
    along: str = "epoch"
    meaning: str = ""
    """What it is and what is good or bad, in plain words."""
    colours: Sequence[int] = ()
    """The number of every curve's colour; unless given, each has its own."""


@dataclass(frozen=True)
class Look:
    """How a logged value is shown: in words, in which unit, on a scale that includes what."""

    title: str
    unit: str
    includes: Sequence[float] = (0,)
    factor: float = 1.0  # from the logged number to the unit
    meaning: str = ""


# What methods and the loop are known to log, in the order shown. Other names are shown as they are.
LOOKS: Mapping[str, Look] = {
    "positive_probability": Look(
        "Probability of the positive",
        "probability",
        (0, 1),
        meaning="How sure the network is which of all keys shows the same image as the query. It "
        "should rise; values far below 1 are usual where there are many keys.",
    ),
    "label_entropy": Look(
        "Entropy of the labels",
        "nats",
        meaning="How widely soft labels spread: 0 is all on the positive. It usually falls as "
        "the labels single out some negatives, and then stays above 0.",
    ),
    "consistency_gap": Look(
        "Gap between the two sides",
        "total variation",
        meaning="How differently the two views of an image spread their similarity over all keys: "
        "0 is alike, 1 has nothing in common. A rise at the start is usual; low is good while the "
        "features keep their spread.",
    ),
    "feature_spread": Look(
        "Spread of the features (0 = collapsed)",
        "spread",
        meaning="How far apart features of different images lie. Near 0 all images look the same "
        "to the network, which is collapse; features of length one reach at most 1.",
    ),
    "effective_rank": Look(
        "Effective rank of the features",
        "dimensions",
        meaning="How many directions the features make use of. A dip at the start is usual; "
        "falling to 1 for good is collapse.",
    ),
    "learning_rate": Look(
        "Learning rate",
        "rate",
        meaning="The size of the optimiser's steps, as planned: nothing to be judged.",
    ),
    "images_per_second": Look(
        "Speed",
        "images/s",
        meaning="Higher is faster. A lasting drop means that images come too slowly or that "
        "something else uses the machine.",
    ),
    "waiting": Look(
        "Time spent waiting for data",
        "%",
        (0, 100),
        factor=100,
        meaning="Near 0 is good. A large share means that reading and decoding images slows the "
        "training.",
    ),
}


@dataclass(frozen=True)
class Claim:
    """A panel of what is measured of negatives (evaluate/similarities.py): a curve for each measure
    that a run has."""

    title: str
    unit: str
    curves: Mapping[str, str]
    includes: Sequence[float] = (0,)
    level: str | None = None
    """A measure that stays the same: what the curves are to be compared with."""
    meaning: str = ""


CLAIMS = (
    Claim(
        "|q_s·B_t − q_t·B_s|",
        "cosine, mean over negatives",
        {
            "similarity_gap": "two views of an image",
            "similarity_gap_unrelated": "views of two images",
        },
        meaning="How far the two views of an image (queries q_s, q_t) disagree about its "
        "similarity to a negative (keys in B_t, B_s). Low is good as long as the same of two "
        "different images is well above it; both near 0 is collapse.",
    ),
    Claim(
        "How evenly a batch falls on negatives",
        "1: on all negatives alike",
        {"similarity_evenness": "similarities", "label_evenness": "soft labels"},
        (0, 1),
        meaning="Whether all negatives together receive alike: 1 is perfectly even and good, near "
        "0 a few negatives take everything, whatever the query.",
    ),
    Claim(
        "Negatives of the query's class",
        "% of the 5 largest",
        {
            "labelled_of_own_class": "by soft label",
            "similar_of_own_class": "by similarity",
        },
        (0, 100),
        level="any_of_own_class",
        meaning="Of the five negatives that a query is told to resemble most, or finds most "
        "similar, how many are of its own class. Well above chance, the network finds related "
        "images. Training does not see the classes.",
    ),
)
KNN_MEANING = (
    "How often the nearest neighbours in feature space name an image's class rightly. Higher is "
    "better; what does not rise above the dashed lines has learnt nothing."
)
LOSS_MEANING = (
    "What training minimises. It should fall in the long run; values of different methods or "
    "settings do not compare."
)
LEVEL_MEANINGS: Mapping[str, str] = {
    "chance": "The dashed line is a blind guess: a term that stays there learns nothing.",
    "unrelated": "The dashed line is what views that have nothing in common would give.",
    "collapsed": "The dashed line is what features that are the same for all images would give.",
}


def panels(history: History) -> list[Panel]:
    """Everything there is to plot, the most telling first."""
    return [
        *_knn_panel(history),
        *_loss_panels(history),
        *claim_panels({"": history}),
        *_other_panels(history),
    ]


def claim_panels(histories: Mapping[str, History]) -> list[Panel]:
    """What became of the paper's claims, in a run or in several by name: of these, each has its
    colour in all panels, as it has where it is a single curve."""
    found = []
    for claim in CLAIMS:
        curves, levels, colours = {}, {}, []
        for number, (name, history) in enumerate(histories.items()):
            for measure, label in claim.curves.items():
                if (series := history.measured(measure)) is not None:
                    curves[f"{name}, {label}" if name else label] = series
                    colours.append(number)
            if claim.level and (series := history.measured(claim.level)) is not None:
                levels = {"chance": series.values[-1]}
        if curves:
            panel = Panel(
                claim.title, claim.unit, curves, levels, claim.includes, meaning=claim.meaning
            )
            found.append(panel if len(histories) == 1 else replace(panel, colours=colours))
    return found


def _knn_panel(history: History) -> list[Panel]:
    knn = history.knn()
    own = {
        history.named(subject): series
        for subject, series in knn.items()
        if subject == history.method
    }
    baselines = {
        subject: series.values[-1] for subject, series in knn.items() if subject != history.method
    }
    if not knn:
        return []
    return [Panel("kNN accuracy", "top-1, %", own, baselines, (0, 100), meaning=KNN_MEANING)]


def _loss_panels(history: History) -> list[Panel]:
    total = {name: series for name, series in history.training.items() if name == "loss"}
    terms = {
        name.removeprefix("loss/").replace("_", " "): series
        for name, series in history.training.items()
        if name.startswith("loss/")
    }
    # Levels are those of a single term, so a total of several is not held against it.
    levels = history.reference_levels
    known = " ".join(LEVEL_MEANINGS[name] for name in levels if name in LEVEL_MEANINGS)
    found = []
    if total:
        meaning = LOSS_MEANING if terms else f"{LOSS_MEANING} {known}".strip()
        found.append(Panel("Loss", "loss", total, {} if terms else levels, meaning=meaning))
    if terms:
        meaning = f"What the loss is made of. {known}".strip()
        if any(name.startswith("consistency") for name in terms):
            meaning += " Consistency cannot fall to 0, so it changes less."
        found.append(Panel("Terms of the loss", "loss", terms, levels, meaning=meaning))
    return found


def _other_panels(history: History) -> list[Panel]:
    names = [name for name in history.training if name.split("/")[0] != "loss"]
    known = [name for name in LOOKS if name in names]
    unknown = sorted(set(names) - set(known))
    found = []
    for name in known + unknown:
        look = LOOKS.get(name) or _look(name)
        series = history.training[name]
        shown = Series(series.epochs, [look.factor * value for value in series.values])
        panel = Panel(
            look.title, look.unit, {name: shown}, includes=look.includes, meaning=look.meaning
        )
        found.append(panel)
    return found


def _look(name: str) -> Look:
    """Of a value that only the method knows."""
    memory = name.removeprefix("fill/")
    if memory != name:
        meaning = "The method works as meant once this memory of past images is full."
        return Look(f"Filling of the {memory}", "%", (0, 100), factor=100, meaning=meaning)
    return Look(name.replace("_", " "), "value", ())
