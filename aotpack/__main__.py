"""`python -m aotpack`."""

from __future__ import annotations

from aotpack.cli import main

main()
