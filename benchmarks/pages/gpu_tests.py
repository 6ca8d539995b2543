"""When the tests that need a GPU passed last."""

from pages.common import (
    AnyRecord,
    Place,
    device,
)
from xmoco.records import (
    read_records,
)


def gpu_tests(place: Place) -> str:
    """When the tests that need a GPU passed last, and where."""
    found = [r for file in place.files("gpu-tests.jsonl") for r in read_records(file, AnyRecord)]
    if not found:
        return ""
    passed, facts = f"{found[-1].value:g} tests", found[-1].protocol
    skipped = f", {facts['skipped']} skipped" if facts.get("skipped") else ""
    commit = f"; commit {found[-1].commit}" if found[-1].commit else ""
    told = f"{device(found[-1])}{commit}; {found[-1].time[:10]}"
    link = place.link(place.results / "gpu-tests.jsonl")
    return f"Last pass: {passed}{skipped}, in {facts['seconds']:.0f} s; {told}. {link}"
