"""Looking at a run from the host: why it skips, where its numbers die, and what to do about it."""

from functional_amp.debug.explain import explain as explain
from functional_amp.debug.explain_range import Range as Range
from functional_amp.debug.explain_table import Explanation as Explanation
from functional_amp.debug.flags import nonfinite_leaves as nonfinite_leaves
from functional_amp.debug.health import Finding as Finding
from functional_amp.debug.health import check_health as check_health
from functional_amp.debug.history import History as History
from functional_amp.debug.history import init_history as init_history
from functional_amp.debug.history import record as record
from functional_amp.debug.nonfinite import NonfiniteLeaf as NonfiniteLeaf
from functional_amp.debug.nonfinite import NonfiniteReport as NonfiniteReport
from functional_amp.debug.nonfinite import nonfinite_paths as nonfinite_paths
from functional_amp.debug.nonfinite import nonfinite_report as nonfinite_report
from functional_amp.debug.plots import plot_scale as plot_scale
from functional_amp.debug.progress import check_progress as check_progress
from functional_amp.debug.simulate import Trajectory as Trajectory
from functional_amp.debug.simulate import simulate as simulate
from functional_amp.debug.underflow import LeafRange as LeafRange
from functional_amp.debug.underflow import UnderflowReport as UnderflowReport
from functional_amp.debug.underflow import underflow_report as underflow_report
