"""What training a model costs: memory, recompute, launches, and which setting changes it.

`command.py` is the command, `run.py` a whole profile; `subject.py` says what is profiled,
`measure.py` observes a step, `findings.py` says what follows from the records of `records.py`.
"""
