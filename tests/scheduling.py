"""Which of several processes runs which test."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

PLAYED_ONCE = {
    "test_groups.py",
    "test_streamed.py",
    "test_processes.py",
    "test_method_processes.py",
    "test_evaluating_processes.py",
    "test_pretraining.py",
}
"""Files with long preparations, which not every process is to repeat."""


class FilesPlayedOnce(LoadScopeScheduling):
    """Gives one process all tests of such a file; others go to whoever is free. Xdist's own groups
    (``--dist loadgroup``) do nothing with pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if file.rpartition("/")[2] in PLAYED_ONCE else nodeid


class Scheduling:
    @staticmethod
    def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesPlayedOnce:
        return FilesPlayedOnce(config, log)
