"""Looking at a run from the host: why a window was not finite, which leaf is not, is the run still moving."""

from functional_amp.debug.explain import explain as explain
from functional_amp.debug.explain_range import Range as Range
from functional_amp.debug.explain_table import Explanation as Explanation
from functional_amp.debug.progress import check_progress as check_progress
from functional_amp.debug.progress import nonfinite_paths as nonfinite_paths
