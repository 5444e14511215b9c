"""Bytes between host and device, by hand for a tiny model: 2 layers, 2 KV heads of 8 numbers."""

import pytest
import torch
from tiny import tiny_llama

from kvacc.engine.transfer_meter import TransferMeter
from kvacc.engine.wrapped import WrappedModel
from kvacc.probes.decoder import make_decoder
from kvacc.probes.transfers import PROCESSOR_METHOD, measure_transfers
from kvacc.strategy import make_strategy

PROMPT, OUTPUT, HEADS = 24, 4, 2
ENTRY = (8 + 8) * 4  # bytes of a key and a value of one head


@pytest.fixture(scope="module")
def wrapped(skewing_folder):
    tokens = [3 + (7 * i) % 100 for i in range(96)]
    return WrappedModel(tiny_llama(num_hidden_layers=3), calibration=lambda source: tokens)


def measure(wrapped, strategy, batch=1, output=OUTPUT, protocol="serve"):
    prompts = torch.arange(PROMPT * batch).view(batch, PROMPT) % 100 + 3
    return measure_transfers(
        lambda: make_decoder(wrapped, strategy, PROMPT, batch, protocol), prompts, output
    )


@pytest.mark.parametrize("batch", [1, 3])
def test_everything_selected_by_hand(wrapped, batch):
    quest = make_strategy("quest", 1.0, page_size=4, dense_layers=1)
    found = measure(wrapped, quest, batch)
    # Two layers select; the tokens after the prompt read the 24, 25 and 26 entries before them.
    assert found.bytes_to_device == 2 * HEADS * 25 * ENTRY
    assert found.bytes_to_host == 2 * HEADS * ENTRY
    assert found.bytes_to_host_of_prompt == batch * 2 * HEADS * PROMPT * ENTRY
    assert found.prefetched_share == 0.0
    assert found.method == PROCESSOR_METHOD


def test_a_budget_moves_less(wrapped):
    quest = make_strategy("quest", 8, page_size=4, dense_layers=1)
    found = measure(wrapped, quest)
    assert 0 < found.bytes_to_device <= 2 * HEADS * 8 * ENTRY
    assert found.bytes_to_host == 2 * HEADS * ENTRY


def test_infinigen_brings_ahead_and_all_time_is_exposed_without_a_stream(wrapped):
    found = measure(wrapped, make_strategy("infinigen", 0.3))
    assert found.prefetched_share == 1.0
    assert found.seconds_hidden == 0.0 < found.seconds_exposed


def test_nothing_is_offloaded_by_others(wrapped):
    assert measure(wrapped, make_strategy("h2o", 0.5)) is None
    assert measure(wrapped, make_strategy("quest", 8, page_size=4), output=1) is None


def test_meter_adds_up_by_kind():
    meter = TransferMeter(torch.device("cpu"))
    meter.count(5, ahead=False)
    meter.count(3, ahead=True)
    with meter.timing("bring"), meter.timing("store"):
        pass
    hidden, exposed = meter.seconds()
    assert (meter.entries, meter.entries_ahead, hidden) == (8, 3, 0.0)
    assert exposed > 0


@pytest.mark.gpu
def test_copies_on_a_gpu_take_time():
    tokens = [3 + (7 * i) % 100 for i in range(96)]
    model = WrappedModel(tiny_llama(num_hidden_layers=3).cuda(), calibration=lambda source: tokens)
    prompts = (torch.arange(PROMPT)[None] % 100 + 3).cuda()
    quest = make_strategy("quest", 1.0, page_size=4, dense_layers=1)
    found = measure_transfers(lambda: make_decoder(model, quest, PROMPT, 1), prompts, OUTPUT)
    assert found.bytes_to_device == 2 * HEADS * 25 * ENTRY
    assert found.seconds_exposed > 0 and found.seconds_hidden >= 0
