"""How far the requests are: in a bar, and to whoever else wants to know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def counted(
    total: int, title: str, quiet: bool, tell: Callable[[int, int], None] | None
) -> Iterator[Callable[[int], None]]:
    """What to call with the number of requests just finished.

    Args:
        quiet: show no bar.
        tell: called with the requests finished, and all.
    """
    done = 0
    with tqdm(total=total, disable=quiet, desc=title) as bar:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            bar.update(count)
            if tell:
                tell(done, total)

        yield advance
