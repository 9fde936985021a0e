"""`timeout`, which asyncio has since Python 3.11: a limit for a block of code, after which `asyncio.TimeoutError`."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from asyncio import timeout as timeout
else:
    from async_timeout import timeout as timeout
