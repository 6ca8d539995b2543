"""What became of faults, damaged inputs and long runs: the last record of each, in a row."""

from pages.common import AnyRecord, Place, device
from xmoco.records import read_records
from xmoco.report.circumstances import last_of_each, markdown_table


def faults_table(place: Place) -> str:
    rows = [row for row in (_chaos(place), _fuzz(place), _endurance(place)) if row]
    headings = ["test", "outcome", "machine"]
    return markdown_table(headings, "lll", rows) if rows else ""


def _last(place: Place, file: str) -> list[AnyRecord]:
    """Of every measure the last record."""
    found = [r for path in place.files(file) for r in read_records(path, AnyRecord)]
    return last_of_each(found, lambda r: (r.measure, r.work))


def _chaos(place: Place) -> list[str] | None:
    last = {record.measure: record for record in _last(place, "chaos.jsonl")}
    if not last:
        return None
    differing, lost, repeated, problems = (
        last[f"chaos_{name}"]
        for name in ("differing_tensors", "checkpoints_lost", "steps_repeated", "problems")
    )
    facts = problems.protocol
    tried = (
        f"a run of {facts['steps']:,} steps with {facts['faults']} injected faults of "
        f"{len(facts['kinds'])} kinds, resumed after each, compared with an undisturbed run"
    )
    came = (
        f"{differing.value:g} tensors differ at the end; {lost.value:g} checkpoints lost; "
        f"{repeated.value:g} steps repeated although checkpointed "
        f"({facts['steps_taken_again']} not yet checkpointed); {problems.value:g} other problems"
    )
    return [tried, came, _circumstances(place, "chaos.jsonl", problems)]


def _fuzz(place: Place) -> list[str] | None:
    for record in _last(place, "fuzz.jsonl"):
        facts = record.protocol
        tried = f"{facts['cases']:,} corrupted or malicious inputs of {len(facts['kinds'])} kinds"
        came = (
            f"{record.value:g} tracebacks, hangs, crashes, programs started or stray files "
            f"written; {facts['refused']:,} rejected with an error message; at most "
            f"{facts['slowest_seconds']:.0f} s and {facts['most_memory_gib']:.1f} GiB each"
        )
        return [tried, came, _circumstances(place, "fuzz.jsonl", record)]
    return None


def _endurance(place: Place) -> list[str] | None:
    last = _last(place, "endurance.jsonl")
    if not last:
        return None
    facts = last[0].protocol
    grown = ", ".join(f"{record.protocol['what']} {record.value:+.1f} %" for record in last)
    tried = f"a run of {facts['steps']:,} steps: growth from its second to its last tenth"
    return [tried, grown, _circumstances(place, "endurance.jsonl", last[0])]


def _circumstances(place: Place, file: str, record: AnyRecord) -> str:
    commit = f"commit {record.commit}, " if record.commit else ""
    return f"{device(record)}; {commit}{record.time[:10]} {place.link(place.results / file)}"
