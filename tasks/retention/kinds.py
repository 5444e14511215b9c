"""Every retention task by name. Adding one: a file with a ``KIND``, a line here, two YAML files."""

from __future__ import annotations

from kvacc.tasks.retention import (
    all_needles,
    dialogue,
    instructions,
    keyvalue,
    last_record,
    multi_needle,
    needle,
    passkey,
    recall,
    variables,
    word_count,
)
from kvacc.tasks.retention.sketch import Kind

KINDS: dict[str, Kind] = {
    module.KIND.name: module.KIND
    for module in (
        passkey, needle, multi_needle, all_needles, keyvalue, variables, last_record, dialogue,
        instructions, recall, word_count,
    )
}  # fmt: skip
