"""Included strategies do not outlive a test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def only_kvaccs_own_strategies(monkeypatch):
    monkeypatch.setattr("kvacc.strategy._INCLUDED", {})
