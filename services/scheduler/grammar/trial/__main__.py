"""`python -m services.scheduler.grammar.trial FD PARENT_PID`."""

import sys

from services.scheduler.grammar.trial.child import main

sys.exit(main(*sys.argv[1:]))
