"""Trial compilation: every grammar is first compiled in a separate process, under limits of time and memory.

A grammar that would run for ever, fill the memory or overflow the stack ends the trial process, and the scheduler
starts another one. `process.py` is the scheduler's side; `child.py` and `measure.py` run in the trial process.
"""
