"""For those who build on the library: strategies, reference models, state machines, conformance suites, faults.

    from functional_amp.testing import check_optimizer, check_scaler, check_step

Needs hypothesis: `pip install hypothesis`. Nothing of the package imports this.
"""

try:
    import hypothesis as hypothesis
except ImportError as error:
    raise ImportError(
        "functional_amp.testing needs hypothesis, which the extra `testing` installs: pip install hypothesis."
    ) from error

from functional_amp.testing import references as references
from functional_amp.testing.compare import assert_alike as assert_alike
from functional_amp.testing.compare import assert_same_bits as assert_same_bits
from functional_amp.testing.compare import leaves_of as leaves_of
from functional_amp.testing.compare import mapped as mapped
from functional_amp.testing.compare import same_bits as same_bits
from functional_amp.testing.conformance.optimizer import check_optimizer as check_optimizer
from functional_amp.testing.conformance.scaler import check_scaler as check_scaler
from functional_amp.testing.conformance.step import check_step as check_step
from functional_amp.testing.faults import Faulty as Faulty
from functional_amp.testing.faults import faulty as faulty
from functional_amp.testing.linear import linear_loss as linear_loss
from functional_amp.testing.machines import scaler_machine as scaler_machine
from functional_amp.testing.machines import step_machine as step_machine
from functional_amp.testing.scales import apex_scales as apex_scales
from functional_amp.testing.scales import backoff_factors as backoff_factors
from functional_amp.testing.scales import deepspeed_scales as deepspeed_scales
from functional_amp.testing.scales import dynamic_scales as dynamic_scales
from functional_amp.testing.scales import flax_scales as flax_scales
from functional_amp.testing.scales import growth_factors as growth_factors
from functional_amp.testing.scales import hyperparameters as hyperparameters
from functional_amp.testing.scales import jmp_scales as jmp_scales
from functional_amp.testing.scales import loss_scales as loss_scales
from functional_amp.testing.scales import megatron_scales as megatron_scales
from functional_amp.testing.scales import scalers as scalers
from functional_amp.testing.strategies import MAGNITUDES as MAGNITUDES
from functional_amp.testing.strategies import gradients as gradients
from functional_amp.testing.strategies import overflow_patterns as overflow_patterns
from functional_amp.testing.strategies import poisoned as poisoned
from functional_amp.testing.strategies import weights as weights
from functional_amp.testing.strategies import windows as windows
from functional_amp.testing.tensors import FLOATS as FLOATS
from functional_amp.testing.tensors import NONFINITE as NONFINITE
from functional_amp.testing.tensors import REST as REST
from functional_amp.testing.tensors import Leaf as Leaf
from functional_amp.testing.tensors import Pair as Pair
from functional_amp.testing.tensors import filled as filled
from functional_amp.testing.tensors import float32s as float32s
from functional_amp.testing.tensors import layouts as layouts
from functional_amp.testing.tensors import powers_of_two as powers_of_two
from functional_amp.testing.tensors import seeds as seeds
from functional_amp.testing.tensors import trees as trees
