"""The gate: does a result still hold against a committed baseline?

:mod:`~kvacc.gate.snapshot`
    a cell with its items, small enough to commit;
:mod:`~kvacc.gate.baseline`
    the baseline file: snapshots, the reasons for them, a checksum;
:mod:`~kvacc.gate.matching`
    which cell of the results answers which cell of the baseline, or why none can;
:mod:`~kvacc.gate.verdicts`
    the statistics: failed, passed, or too few items to tell;
:mod:`~kvacc.gate.outputs`
    JUnit XML, Markdown, annotations and JSON;
:mod:`~kvacc.gate.check`
    all of it, as ``kvacc check`` and the pytest fixture use it.
"""
