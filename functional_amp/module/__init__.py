"""From an `nn.Module` to a pure function of its tensors, and back."""

from functional_amp.module.apply import Apply as Apply
from functional_amp.module.apply import FromModule as FromModule
from functional_amp.module.apply import from_module as from_module
from functional_amp.module.back import to_module as to_module
