"""Probes: what a strategy buys in time and memory, measured on the step path.

:mod:`~kvacc.probes.records`    what a measurement says, and the file that holds it
:mod:`~kvacc.probes.decoder`    reads a prompt and decodes, under a strategy or a stock kernel
:mod:`~kvacc.probes.memory`     bytes that are live now, and their peak
:mod:`~kvacc.probes.capacity`   the longest prompt and the largest batch that fit
:mod:`~kvacc.probes.latency`    time to first token, time per output token
:mod:`~kvacc.probes.transfers`  bytes between host and device, time hidden and exposed
:mod:`~kvacc.probes.config`     what is to be measured; :mod:`~kvacc.probes.cases` plans it
:mod:`~kvacc.probes.run`        measures it all, and goes on where it was stopped
:mod:`~kvacc.probes.store`      records on disk
:mod:`~kvacc.probes.rows`       records side by side; :mod:`~kvacc.probes.report` prints them
"""
