"""Records as tables in Markdown, for README.md and docs/measurements.md.

Three kinds of files in benchmarks/results have their own kind of table in the README: what recipes
learn, what every protocol says of some backbones, how fast training is. All other records are lines
of docs/measurements.md, whatever they measure. Below a table stands how its figures came about;
where records differ in that, all is told. Of measurements that were repeated, the last counts.
"""

import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from xmoco.demo import NAMES

ROOT = Path(__file__).resolve().parent.parent

Record = dict[str, Any]
Fact = Callable[[Record], str | None]
"""Something to tell of a record, if it is known."""

IN_README = {
    "demo.jsonl": {"knn_top1"},
    "recipe-*.jsonl": {"knn_top1"},
    "protocols-*.jsonl": {
        "knn_top1",
        *("linear_top1", "linear_top5", "finetune_top1", "finetune_top5"),
        *("transfer_frozen", "transfer_end_to_end"),
    },
    "speed.jsonl": {"images_per_second", "stage_ms"},
}
"""Files that the README has tables of, and the measures that these know."""

SUBJECTS = NAMES | {
    "xmoco, K 65,536": "XMoCo, K 65,536",
    "encoder only": "the encoder alone, compiled",
    "lightly": "lightly, at its best",
    "lightly, compiled": "lightly, at its best and compiled",
    "lightly (its defaults)": "lightly, its defaults",
}
SHOWN_LAST = ("supervised", "untrained")
"""Backbones that are no rivals."""
NEIGHBOURS = (20, 200)
"""Of the numbers of neighbours that may vote, the README shows these."""
QUARTERS = range(1, 5)
"""Of a training: what it had reached when each was over is shown in the README."""

RACE = (
    "The contenders train the same network on the same images and take turns; the median round "
    "counts. The encoder alone has no images, views, loss or optimiser around it, and is a bound "
    "where the GPU is the limit; for small images it is not, as launching the kernels one by one "
    "takes longer than running them. On the CPU, the rivals are plain PyTorch with torchvision's "
    "views in a DataLoader; `our step` is the same with xmoco's steps and start-up, so that the "
    "rest is what the views of xmoco save. lightly at its best has bf16, 16 workers, pinned "
    "memory, channels-last and a fused optimiser. `waiting` is the share of time without images; "
    "of the stages, `images` is what a batch takes that was read and decoded ahead. Contenders "
    "have a process each."
)

SETTINGS = (
    *("data", "digest", "size", "crop_size", "epoch", "epochs", "batch", "k"),
    *("name", "label_fraction", "set"),
    *("device", "precision", "launch", "stage", "recipe", "changes", "strengths", "seed"),
)
"""Of a protocol, and the seed: records that differ in one of these measure different things."""
LONGEST_FACT = 200


def results_tables(folder: Path) -> str:
    """How good backbones are, for the README."""
    learning = [
        learning_table(file, same_work)
        for pattern in ("demo.jsonl", "recipe-*.jsonl")
        for file, records in shown_in_readme(folder, pattern)
        for same_work in grouped(records, by_work)
    ]
    protocols = [
        protocols_table(file, records)
        for file, records in shown_in_readme(folder, "protocols-*.jsonl")
    ]
    return "\n\n".join(learning + protocols)


def speed_tables(folder: Path) -> str:
    """How fast training is and where its time goes, for the README."""
    tables = []
    for file, records in shown_in_readme(folder, "speed.jsonl"):
        tables.append(RACE)
        for same_work in grouped(records, by_work):
            speeds = [r for r in same_work if r["measure"] == "images_per_second"]
            stages = [r for r in same_work if r["measure"] == "stage_ms"]
            if speeds:
                tables.append(race_table(file, speeds))
            tables += [stages_table(file, of_one) for of_one in grouped(stages, by_subject)]
    return "\n\n".join(tables)


def measurements_page(folder: Path) -> str:
    """docs/measurements.md: all records that the README does not show."""
    tables = [
        plain_table(file, records)
        for file in sorted(folder.glob("*.jsonl"))
        if (records := [r for r in read(file) if r["measure"] not in known_measures(file)])
    ]
    parts = [
        "# Measurements",
        "What the programs in `benchmarks/` measured, beside the tables of the README. "
        "`benchmarks/readme.py` writes this page from their records.",
        *(tables or ["There are no such records yet."]),
    ]
    return "\n\n".join(parts) + "\n"


def read(file: Path) -> list[Record]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def known_measures(file: Path) -> set[str]:
    return next((known for pattern, known in IN_README.items() if file.match(pattern)), set())


def shown_in_readme(folder: Path, pattern: str) -> Iterator[tuple[Path, list[Record]]]:
    for file in sorted(folder.glob(pattern)):
        if records := [r for r in read(file) if r["measure"] in known_measures(file)]:
            yield file, records


def by_work(record: Record) -> str:
    return str(record["work"])


def by_subject(record: Record) -> str:
    return str(record["subject"])


def grouped(records: Iterable[Record], key: Callable[[Record], Hashable]) -> list[list[Record]]:
    groups: dict[Hashable, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return list(groups.values())


def last_of_each(records: Iterable[Record], key: Callable[[Record], Hashable]) -> list[Record]:
    """The records that count, in the order in which they were measured first."""
    return list({key(record): record for record in records}.values())


def learning_table(file: Path, records: Sequence[Record]) -> str:
    """kNN accuracy as training goes on, and the time of the whole run."""
    records = last_of_each(
        records, lambda r: (by_subject(r), r["seed"], epoch(r), r["protocol"]["k"])
    )
    last = max(map(epoch, records))
    one_size = len(set(map(image_size, records))) == 1
    rows = []
    for record in at_quarters(records, last):
        seconds = record["protocol"].get("run_seconds")
        # The time is that of the whole run, so it stands beside the last epoch only.
        finished = seconds is not None and epoch(record) == last
        rows.append(
            [
                name_of(record) + ("" if one_size else f", {record['protocol']['size']} px"),
                str(epoch(record) or ""),
                percentage(record),
                f"{seconds:,.0f} s" if finished else "",
            ]
        )
    return section(
        f"**{by_work(records[0])}**",
        markdown_table(["features of", "epochs", "kNN top-1", "training time"], "lrrr", rows),
        circumstances(records, data, judged_by_neighbours, votes, image_size, kept_watch),
        file,
    )


def at_quarters(records: Sequence[Record], last: int) -> list[Record]:
    """What every subject had reached when each quarter of ``last`` epochs was over."""
    chosen: list[Record] = []
    for of_one in grouped(records, by_subject):
        reached = [[epoch(r) for r in of_one if epoch(r) <= last * q / 4] for q in QUARTERS]
        wanted = {max(epochs) for epochs in reached if epochs}
        chosen += [record for record in of_one if epoch(record) in wanted]
    return chosen


def protocols_table(file: Path, records: Sequence[Record]) -> str:
    """A row for every protocol; a column for every backbone and, if there are several, size of the
    images it was judged by."""
    records = [record for record in records if protocol_name(record)]
    one_size = len(set(map(image_size, records))) == 1
    one_crop = len(set(map(crop_size, records)) - {None}) <= 1

    def row(record: Record) -> str:
        crops = None if one_crop else crop_size(record)
        return ", ".join(filter(None, [protocol_name(record), crops]))

    digests = {(backbone_name(r), d) for r in records if (d := r["protocol"].get("digest"))}
    names = [name for name, _ in digests]

    def column(record: Record) -> str:
        """Different weights of one name have columns of their own."""
        name, protocol = backbone_name(record), record["protocol"]
        size = "" if one_size else f", {protocol['size']} px"
        digest = f" ({protocol.get('digest', '?')[:6]})" if names.count(name) > 1 else ""
        return f"{name}{size}{digest}"

    cells = {(row(record), column(record)): record for record in records}
    shown = list(cells.values())
    columns = list(dict.fromkeys(map(column, sorted(shown, key=place_of_backbone))))
    rows = []
    for protocol in dict.fromkeys(map(row, sorted(shown, key=place_of_protocol))):
        measured = [cells.get((protocol, each)) for each in columns]
        rows.append([protocol, *("" if r is None else percentage(r) for r in measured)])
    return section(
        f"**{file.stem.removeprefix('protocols-')}**",
        markdown_table(["protocol", *columns], "l" + "r" * len(columns), rows),
        circumstances(shown, judged_on, image_size, crop_size),
        file,
    )


def protocol_name(record: Record) -> str:
    """As it stands in the table; nothing if it does not."""
    protocol = record["protocol"]
    match record["measure"]:
        case "knn_top1" if protocol["k"] in NEIGHBOURS:
            return f"kNN, k {protocol['k']}"
        case "linear_top1":
            return str(protocol["name"])
        case "finetune_top1":
            return f"{protocol['name']}, {100 * protocol['label_fraction']:g} % of the labels"
        case "transfer_frozen" | "transfer_end_to_end":
            how = protocol["name"].removeprefix("transfer, ")
            metric = "" if protocol["metric"] == "top-1" else f", {protocol['metric']}"
            return f"transfer to {protocol['set']}, {how}{metric}"
    return ""


def crop_size(record: Record) -> str | None:
    """Of the random crops that a protocol learns from, if it does."""
    protocol = record["protocol"]
    if record["measure"] in ("knn_top1", "transfer_frozen"):
        return None
    return f"crops of {protocol.get('crop_size', protocol['size'])} px"


def place_of_protocol(record: Record) -> tuple[int, float]:
    """By kind; then by neighbours or labels, from few to many."""
    protocol = record["protocol"]
    kinds = ("knn_top1", "linear_top1", "finetune_top1", "transfer_frozen", "transfer_end_to_end")
    amount = protocol.get("k", protocol.get("label_fraction", 0))
    return kinds.index(record["measure"]), amount


def backbone_name(record: Record) -> str:
    return f"{name_of(record)}, {epoch(record)} epochs" if epoch(record) else name_of(record)


def place_of_backbone(record: Record) -> tuple[int, int]:
    subject = by_subject(record)
    last = 1 + SHOWN_LAST.index(subject) if subject in SHOWN_LAST else 0
    return last, record["protocol"]["size"]


def race_table(file: Path, records: Sequence[Record]) -> str:
    """Contenders beside each other."""
    records = last_of_each(records, by_subject)
    rows = []
    for record in records:
        told = record["protocol"].get
        ratio, gib, waiting = told("times_rival"), told("gpu_memory_gib"), told("waiting")
        rows.append(
            [
                name_of(record),
                told("precision", ""),
                f"{record['value']:,.0f}",
                "" if ratio is None else f"{ratio:.2f}",
                "" if gib is None else f"{gib:.1f} GiB",
                "" if waiting is None else f"{100 * waiting:.1f} %",
            ]
        )
    headings = ["", "precision", "images/s", "× best rival", "GPU memory", "waiting"]
    return section(
        f"**{by_work(records[0])}**",
        markdown_table(headings, "llrrrr", rows),
        circumstances(records, *SPEED_FACTS),
        file,
    )


def stages_table(file: Path, records: Sequence[Record]) -> str:
    """Where the time of a step goes, when that was measured last."""
    stages: dict[str, Record] = {}
    for record in records:
        stage = record["protocol"]["stage"]
        if stage in stages:  # it was measured again, and so were the others
            stages = {}
        stages[stage] = record
    total = sum(record["value"] for record in stages.values())
    rows = [
        [stage, f"{record['value']:.2f}", f"{100 * record['value'] / total:.1f} %"]
        for stage, record in stages.items()
    ]
    shown = list(stages.values())
    return section(
        f"**{by_work(shown[0])}: stages of a step of {name_of(shown[0])}**",
        markdown_table(["stage", "ms", "share"], "lrr", rows),
        "Each stage alone and without a CUDA graph; in training they overlap. "
        f"{circumstances(shown, *SPEED_FACTS)}",
        file,
    )


def plain_table(file: Path, records: Sequence[Record]) -> str:
    """Records of any kind: a row for every work and its settings, a column for what was measured
    of whom."""

    def settings(record: Record, keys: Iterable[str]) -> list[str]:
        known = record["protocol"] | {"seed": record["seed"]}
        return [protocol_fact(key, known[key]) for key in keys if key in known]

    def row(record: Record) -> tuple[str, ...]:
        return by_work(record), *settings(record, SETTINGS)

    def column(record: Record) -> tuple[str, str]:
        return by_subject(record), record["measure"].replace("_", " ")

    cells = {(row(record), column(record)): record for record in records}
    records = list(cells.values())
    differing = [key for key in SETTINGS if len({str(settings(r, [key])) for r in records}) > 1]
    firsts = list({row(record): record for record in reversed(records)}.values())[::-1]
    columns = list(dict.fromkeys(map(column, records)))
    subjects, measures = (set(names) for names in zip(*columns, strict=True))
    if len(subjects) == 1:
        headings = [measure for _, measure in columns]
    elif len(measures) == 1:
        headings = [subject for subject, _ in columns]
    else:
        headings = [f"{subject}: {measure}" for subject, measure in columns]
    rows = []
    for first in firsts:
        measured = [cells.get((row(first), each)) for each in columns]
        values = ["" if r is None else f"{significant(r['value'])} {r['unit']}" for r in measured]
        told = [", ".join(settings(first, differing))] if differing else []
        rows.append([by_work(first), *told, *values])
    settings_heading = ["settings"] if differing else []
    alone = [names.pop() for names in (measures, subjects) if len(names) == 1]
    return section(
        f"## {file.stem}",
        markdown_table(
            ["work", *settings_heading, *headings],
            "l" * (1 + len(settings_heading)) + "r" * len(columns),
            rows,
        ),
        circumstances(records, lambda _: "; ".join([*alone, shared_facts(records)])),
        file,
        up="../",
    )


def shared_facts(records: Sequence[Record]) -> str:
    """What the protocols of all records agree in, as far as it is short."""
    first, *others = (record["protocol"] for record in records)
    shared = [key for key in first if all(other.get(key) == first[key] for other in others)]
    facts = [protocol_fact(key, first[key]) for key in shared if not isinstance(first[key], dict)]
    return "; ".join(fact for fact in facts if len(fact) <= LONGEST_FACT)


def protocol_fact(key: str, value: object) -> str:
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    elif isinstance(value, int):
        value = f"{value:,}"
    elif isinstance(value, float):
        value = f"{value:.4g}"
    return f"{key.replace('_', ' ')} {value}"


def significant(value: float) -> str:
    """Four digits, or more where there are more before the point."""
    if value == 0 or not math.isfinite(value):
        return str(value)
    return f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


def percentage(record: Record) -> str:
    return f"{record['value']:.1f} {record['unit']}"


def name_of(record: Record) -> str:
    return SUBJECTS.get(by_subject(record), by_subject(record))


def epoch(record: Record) -> int:
    """Epochs of training without labels, or with them, that the backbone has seen."""
    return int(record["protocol"]["epoch"])


def circumstances(records: Sequence[Record], *facts: Fact) -> str:
    """The facts, and then seed, machine, versions, commit and date; several where they differ."""
    general: tuple[Fact, ...] = (
        lambda r: f"seed {r['seed']}",
        lambda r: machine(r["machine"]),
        lambda r: f"torch {r['versions']['torch']}",
        lambda r: f"commit {r['commit']}" if r["commit"] else None,
        lambda r: r["time"][:10],
    )
    told = (" / ".join(dict.fromkeys(filter(None, map(f, records)))) for f in (*facts, *general))
    return "; ".join(filter(None, told)) + "."


def setting(key: str, words: str) -> Fact:
    """A setting of the protocol in words, where it has it."""
    return lambda record: (
        words.format(record["protocol"][key]) if key in record["protocol"] else None
    )


image_size = setting("size", "images of {} px")
batch_size = setting("batch", "batch {}")
bank_length = setting("bank_length", "K {}")


def data(record: Record) -> str:
    """Without what tells the split: ``archive pets.tar (train), 80 % kept`` is of pets.tar."""
    return str(record["protocol"].get("data", "")).partition(" (train)")[0]


def number_of_rounds(record: Record) -> str | None:
    rounds = record["protocol"].get("rounds")
    return None if rounds is None else f"{len(rounds)} rounds" if len(rounds) > 1 else "1 round"


SPEED_FACTS = (data, batch_size, bank_length, image_size, number_of_rounds)


def judged_by_neighbours(record: Record) -> str:
    protocol = record["protocol"]
    if protocol["split"] == "leave one out":
        return f"each of {protocol['judged_images']:,} images judged by all others"
    return (
        f"{protocol['judged_images']:,} {protocol['split']} images judged by "
        f"{protocol['bank_images']:,} training images"
    )


def judged_on(record: Record) -> str:
    return f"{data(record)}, {record['protocol']['judged_images']:,} test images"


def votes(record: Record) -> str:
    return f"k {record['protocol']['k']}, temperature {record['protocol']['temperature']}"


def kept_watch(record: Record) -> str | None:
    """How often a run that took its time was interrupted for kNN."""
    settings = yaml.safe_load(record["protocol"].get("settings", "{}"))
    every = settings.get("monitor", {}).get("knn_every")
    if every is None:
        return None
    return f"the time includes kNN every {'epoch' if every == 1 else f'{every} epochs'}"


def machine(facts: dict[str, Any]) -> str:
    return ", ".join([*facts.get("gpus", []), facts["processor"], f"{facts['threads']} threads"])


def section(heading: str, table: str, below: str, file: Path, up: str = "") -> str:
    """``up`` leads from the page to the root of the repository."""
    link = f"{up}{file.relative_to(ROOT)}" if file.is_relative_to(ROOT) else file.name
    return f"{heading}\n\n{table}\n\n{below} ([records]({link}))"


def markdown_table(headings: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> str:
    rules = ["---:" if side == "r" else "---" for side in align]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [headings, rules, *rows])
