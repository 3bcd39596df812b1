"""Optimizers as pairs of pure functions, and learning-rate schedules."""

from functional_amp.optim.adam import AdamState as AdamState
from functional_amp.optim.adam import adam as adam
from functional_amp.optim.adam import adamw as adamw
from functional_amp.optim.base import Optimizer as Optimizer
from functional_amp.optim.base import apply_updates as apply_updates
from functional_amp.optim.decays import cosine_restarts as cosine_restarts
from functional_amp.optim.decays import exponential as exponential
from functional_amp.optim.decays import one_cycle as one_cycle
from functional_amp.optim.decays import polynomial as polynomial
from functional_amp.optim.decays import warmup as warmup
from functional_amp.optim.from_torch import TorchState as TorchState
from functional_amp.optim.from_torch import from_torch as from_torch
from functional_amp.optim.partition import partition as partition
from functional_amp.optim.schedules import constant as constant
from functional_amp.optim.schedules import cosine as cosine
from functional_amp.optim.schedules import join as join
from functional_amp.optim.schedules import linear as linear
from functional_amp.optim.schedules import warmup_cosine as warmup_cosine
from functional_amp.optim.sgd import SGDState as SGDState
from functional_amp.optim.sgd import sgd as sgd
from functional_amp.optim.torch_schedules import from_torch_schedule as from_torch_schedule
