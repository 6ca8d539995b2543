"""The paper's tables of detection with measured rows below them: one for each kind of detector.

Measured rows come from records, the paper's from ``report/paper_detection.yaml``. Rows compare when
images, schedule, size, metric and backbone agree; the paper's are Detectron2's, and never do.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from xmoco.detect.metrics import PLURALS, TITLES
from xmoco.detect.models import DESIGNS
from xmoco.errors import UserError
from xmoco.records import DetectionProtocol, Measured, read_records
from xmoco.report.circumstances import grouped, last_of_each
from xmoco.report.tables import (
    Cell,
    Column,
    Row,
    Setting,
    Table,
    backbone_name,
    cell_of,
    label_of,
    write_tables,
)

Detected = Measured[DetectionProtocol]
COLUMNS: Mapping[str, Column] = {
    f"{kind}_{measure}": Column(what, TITLES[measure])
    for kind, what in PLURALS.items()
    for measure in ("ap", "ap50", "ap75")
}
"""By measure: those of boxes first, as in the paper's file."""
NOTES = (
    "In %. Per column, the best is bold and the second underlined (equal figures alike) among rows "
    "under one heading; backbones trained with labels take no part. ± is the standard deviation "
    "over seeds.",
    "The paper's figures are of Detectron2 and whole sets: compare rows under one heading only.",
)


class DetectorRow(Row):
    @property
    def block(self) -> str:
        where = "Measured" if self.measured else "Paper"
        return f"{where}: {self.setting.protocol}, {backbone_name(self.setting.backbone)}"


def draw_detection(records_files: Sequence[Path], out: Path) -> list[Path]:
    """Write ``detection-MODEL``, as .md and .png, for every model that has records.

    Existing files of these names are overwritten: they follow from the records.
    """
    records = [r for file in records_files for r in read_records(file, Detected, COLUMNS)]
    if not records:
        raise UserError(
            f"no records of detection in {', '.join(map(str, records_files))}: measure some with "
            "`xmoco evaluate detect WEIGHTS IMAGES --records FILE`."
        )
    tables = {
        f"detection-{model}": _table(model, [r for r in records if r.protocol.model == model])
        for model in dict.fromkeys(record.protocol.model for record in records)
    }
    return write_tables(tables, out)


def _table(model: str, records: Sequence[Detected]) -> Table:
    rows = [*_paper_rows(model), *_measured_rows(records)]
    there = {column for row in rows for column in row.cells}
    design = DESIGNS.get(model)
    title = f"Detection: {model if design is None else design.title}, all layers tuned"
    return Table(title, [c for c in COLUMNS.values() if c in there], rows, NOTES)


def _paper_rows(model: str) -> Iterator[DetectorRow]:
    text = (resources.files("xmoco") / "report" / "paper_detection.yaml").read_text("utf-8")
    blocks: list[dict[str, Any]] = yaml.safe_load(text)
    for block in blocks:
        if block["model"] != model:
            continue
        protocol = ", ".join(filter(None, (block["images"], block.get("schedule"))))
        for method, values in block["rows"].items():
            yield DetectorRow(
                label=method,
                setting=Setting("resnet50", 800, protocol),
                measured=False,
                labelled=method == "Supervised",
                cells=dict(zip(COLUMNS.values(), map(Cell, values), strict=False)),
            )


def _measured_rows(records: Sequence[Detected]) -> Iterator[DetectorRow]:
    """One for each backbone, over seeds; of a seed that was measured again, the last counts."""
    counted = last_of_each(
        records, lambda r: (_setting(r), r.subject, r.protocol.digest, r.measure, r.seed)
    )
    backbones = grouped(counted, lambda r: (_setting(r), r.subject, r.protocol.digest))
    alike = Counter((_setting(own[0]), _label(own[0])) for own in backbones)
    for own in backbones:
        first, label = own[0], _label(own[0])
        cells = {
            COLUMNS[of_measure[0].measure]: cell_of([r.value for r in of_measure])
            for of_measure in grouped(own, lambda r: r.measure)
        }
        yield DetectorRow(
            label=f"{label} ({first.protocol.digest[:6]})"
            if alike[_setting(first), label] > 1
            else label,
            setting=_setting(first),
            measured=True,
            labelled=first.protocol.labelled or first.subject == "supervised",
            cells=cells,
        )


def _label(record: Detected) -> str:
    return label_of(record.subject, record.protocol.epoch, record.protocol.backbone)


def _setting(record: Detected) -> Setting:
    told = record.protocol
    protocol = f"{told.data}, {told.schedule}, shorter side {told.size} px, metric {told.metric}"
    return Setting(told.backbone, told.size, protocol)
