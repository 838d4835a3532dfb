"""A trial process, seen from the scheduler."""

import msgspec

from protocol.sampling import StructuredOutputParams
from services.helper_process import HelperProcess
from services.scheduler.grammar.limits import SETUP_SECONDS, WALL_SECONDS
from services.scheduler.grammar.trial.measure import TrialVerdict
from services.scheduler.grammar.vocabulary import GrammarVocabulary

MODULE = "services.scheduler.grammar.trial.child"
_ENVIRONMENT = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX"), "1")
_verdict = msgspec.msgpack.Decoder(TrialVerdict).decode


class TrialEnded(Exception):
    """The process ended, was killed or sent nonsense before it answered."""


class TrialProcess:
    """All methods belong to one thread, except `kill`, which any thread may call."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        """Start the process and wait until it has read the tokenizer.

        Raises: TrialEnded, if it does not start; the text, for the log, gives the reason.
        """
        self._process = HelperProcess(MODULE, _ENVIRONMENT)
        self.kill, self.close = self._process.kill, self._process.close
        try:
            if error := self._request(vocabulary, SETUP_SECONDS).error:
                raise TrialEnded(f"the tokenizer cannot be used for structured output: {error}")
        except TrialEnded:
            self.close()
            raise

    def verdict(self, params: StructuredOutputParams) -> TrialVerdict:
        """Raises: TrialEnded; the process cannot be used afterwards."""
        return self._request(params, WALL_SECONDS)

    def _request(self, message: GrammarVocabulary | StructuredOutputParams, seconds: float) -> TrialVerdict:
        try:
            return _verdict(self._process.exchange(msgspec.msgpack.encode(message), seconds))
        except TimeoutError:
            raise TrialEnded("the trial process took too long") from None
        except (EOFError, OSError, msgspec.MsgspecError):
            raise TrialEnded("the trial process has ended") from None
