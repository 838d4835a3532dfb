"""Sizes of the engine for the settings of a what-if."""

from protocol.membership import Loaded
from services.config import SchedulerConfig
from services.scheduler.core.limits import Limits
from services.scheduler.membership.sizes import GroupError, fit
from services.scheduler.recording.records import RecordingHeader


def limits_for(header: RecordingHeader, config: SchedulerConfig) -> Limits:
    """Return the sizes that the recorded workers would give; a number of blocks that is set is assumed to fit.

    Raises: ValueError, if the context does not fit the blocks.
    """
    blocks = max(header.limits.num_blocks, config.num_gpu_blocks_override or 0)
    groups = header.limits.groups
    loaded = Loaded("", header.vocab_size, header.limits.max_model_len, 0, blocks, groups=groups)
    try:
        return fit(config, [loaded], header.limits.leaves_rows_out)
    except GroupError as error:
        raise ValueError(str(error)) from None
