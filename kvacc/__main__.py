"""``python -m kvacc``."""

from __future__ import annotations

from kvacc.cli import main

if __name__ == "__main__":
    main()
