"""benchmarks/gpu_tests.py: what pytest reports becomes the record of a pass."""

import importlib
from pathlib import Path

import pytest

REPORT = """<testsuites><testsuite time="1.75">
<testcase name="a" time="1.25"/>
<testcase name="b" time="0.5"><system-out>said</system-out></testcase>
<testcase name="c" time="0"><skipped message="needs two"/></testcase>
<testcase name="d" time="0.25"><failure message="1 is not 2"/></testcase>
</testsuite></testsuites>"""


@pytest.mark.usefixtures("benchmarks")
def test_a_report_becomes_a_record(tmp_path: Path) -> None:
    program = importlib.import_module("gpu_tests")
    (tmp_path / "report.xml").write_text(REPORT)
    record = program.read_report(tmp_path / "report.xml")
    assert (record.measure, record.value, record.unit) == ("gpu_tests_passed", 2, "tests")
    assert record.protocol == {"failed": 1, "skipped": 1, "seconds": 1.8}


@pytest.mark.usefixtures("benchmarks")
def test_files_with_such_tests_are_found() -> None:
    found = {file.name for file in importlib.import_module("gpu_tests").files()}
    assert {"test_gpu.py", "test_step.py", "test_streamed.py", "test_jpeg.py"} <= found
    assert "test_records.py" not in found


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize(("cores", "processes"), [(16, "12"), (2, "1"), (None, "1")])
def test_tests_are_shared_out_where_that_is_possible(
    cores: int | None, processes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = importlib.import_module("gpu_tests")
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert program.shared_out() == ["-n", processes]
    monkeypatch.setattr(program, "find_spec", lambda _: None)
    assert program.shared_out() == []
