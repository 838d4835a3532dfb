"""Trial compilation: every grammar is compiled first in a process of its own, under limits of time and memory.

A grammar that would run for ever, fill the memory or overflow the stack ends the trial process, and the scheduler
starts another one. `process.py` is the scheduler's side, `child.py` and `measure.py` run in the trial process, and
`messages.py` has the messages between them.
"""
