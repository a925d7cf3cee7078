"""Assembly of the plugin on one DeepSpeed engine: configuration, parts, session."""

from __future__ import annotations

from ds_ckpt.engine.refusals import has_optimizer
from ds_ckpt.engine.session import ATTRIBUTE, Session, end_earlier_sessions, ensure_log_handler

__all__ = ["ATTRIBUTE", "Session", "end_earlier_sessions", "ensure_log_handler", "has_optimizer"]
