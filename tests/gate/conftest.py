"""Every test of the gate starts outside any CI, in an empty folder."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_ci(monkeypatch, tmp_path):
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
