"""What methods look at; apart from `rules`, so that reading a configuration loads no torch."""

from __future__ import annotations

LOOKS_AT: dict[str, tuple[str, ...]] = {
    "topk": ("topk",),
    "powersgd": ("powersgd", "topk"),  # embeddings go by Top-K there
    "quantize": ("quantize",),
    "hybrid": ("hybrid", "powersgd", "quantize", "topk"),
}
"""The methods whose settings a method looks at; the others look at none."""
