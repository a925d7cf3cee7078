"""Where everything is put together: configuration, parts, engine."""

from __future__ import annotations

from ds_ckpt.engine.refusals import trains
from ds_ckpt.engine.session import ATTRIBUTE, Session, make_heard

__all__ = ["ATTRIBUTE", "Session", "make_heard", "trains"]
