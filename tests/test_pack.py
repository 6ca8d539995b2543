"""benchmarks/pack.py: packages for a machine without network."""

import importlib
import tarfile
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def program(benchmarks: None) -> ModuleType:
    return importlib.import_module("pack")


def test_what_packages_need_is_found_and_what_is_there_is_left_out(program: ModuleType) -> None:
    there = ["torch", "torchvision", "numpy"]
    found = program.needed(["xmoco"], extras=["timm"], there=there, python="3.12")
    assert {"timm", "rich", "markdown-it-py", "mdurl"} <= found  # mdurl by two packages between
    # What only torch needs; what is there; and what another extra brings.
    assert not found & {"torch", "sympy", "numpy", "hotcoco", "onnx"}


def test_every_package_is_in_the_lock_file(program: ModuleType) -> None:
    roots = ["xmoco", *program.ALSO]
    names = program.needed(roots, program.EXTRAS, program.THERE, "3.12") - {"xmoco"}
    lock = (program.TREE / "requirements.lock").read_text(encoding="utf-8")
    sections = list(program.sections(lock, names))
    assert {section.partition("==")[0] for section in sections} == names
    assert all("--hash=sha256:" in section for section in sections)


def test_a_package_that_is_not_installed_is_named(program: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no-such-package is not installed here"):
        program.needed(["no-such-package"], extras=[], there=[], python="3.12")


def test_what_one_version_of_python_needs(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another than the one here."""
    needs = [
        "old; python_version < '3.12'",
        "new; python_version >= '3.12'",
        "plugin; extra == 'x'",
    ]
    monkeypatch.setattr(program, "requires", {"app": needs}.get)
    for python, found in (("3.11", "old"), ("3.12", "new"), ("3.13", "new")):
        assert program.needed(["app"], [], [], python) == {"app", found}


def test_what_is_not_read_is_left_out(program: ModuleType, tmp_path: Path) -> None:
    kept = ["timm/data/loader.py", "fontTools/agl.py", "fontTools/misc/fixedTools.py", "cabinet.py"]
    left = ["bin/pytest", "rich/a.pyi", "matplotlib/tests/test_x.py", "fontTools/pens/basePen.py"]
    for name in [*kept, *left]:
        file = tmp_path / "site" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    out = tmp_path / "new folder" / "packages.tar.xz"
    program.pack(tmp_path / "site", out)
    with tarfile.open(out) as archive:
        assert archive.getnames() == sorted(kept)
