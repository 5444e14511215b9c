"""Tiny models are slower on several threads than on one; included strategies do not outlive a test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def only_kvaccs_own_strategies(monkeypatch):
    monkeypatch.setattr("kvacc.strategy._INCLUDED", {})


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
