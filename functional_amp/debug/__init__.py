"""Looking at a run from the host: which leaf is not finite, and is the run still moving."""

from functional_amp.debug.progress import check_progress as check_progress
from functional_amp.debug.progress import nonfinite_paths as nonfinite_paths
