"""Translation of a request's grammar into the text that llguidance reads.

It runs in the trial process, because it reads hostile text.
"""

from services.scheduler.grammar.translate.kinds import KIND_NAMES, translate
