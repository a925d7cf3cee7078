"""Host memory that is handed out and taken back: pinned where a GPU copies to and from it.

Imports torch alone. Knows nothing of what is kept in it.
"""

from __future__ import annotations

from ds_ckpt.memory.pool import HostPool

__all__ = ["HostPool"]
