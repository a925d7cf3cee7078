"""How results are shown: documents of text, tables and charts, as a page, Markdown and a terminal.

Nothing here knows what was measured. Numbers get their units in `ds_ckpt.telemetry.units`.
"""
