"""Optimizers and schedules with DeepSpeed's and torch's mathematics, as optax transformations, and parameter groups."""

from zerojax.optim.adaptive import adagrad as adagrad
from zerojax.optim.adaptive import adam as adam
from zerojax.optim.adaptive import adamw as adamw
from zerojax.optim.groups import grouped as grouped
from zerojax.optim.layerwise import lamb as lamb
from zerojax.optim.momentum import lion as lion
from zerojax.optim.momentum import sgd as sgd
from zerojax.optim.names import by_name as by_name
from zerojax.optim.names import learning_rates as learning_rates
from zerojax.optim.names import momentum_by_name as momentum_by_name
from zerojax.optim.names import schedule_by_name as schedule_by_name
from zerojax.optim.orthogonal import muon as muon
from zerojax.optim.rounding import kahan as kahan
from zerojax.optim.rounding import master_weights as master_weights
from zerojax.optim.rounding import narrow_state as narrow_state
from zerojax.optim.rounding import stochastic_rounding as stochastic_rounding
from zerojax.optim.schedules import CYCLE_B2 as CYCLE_B2
from zerojax.optim.schedules import lr_range_test as lr_range_test
from zerojax.optim.schedules import one_cycle as one_cycle
from zerojax.optim.schedules import one_cycle_momentum as one_cycle_momentum
from zerojax.optim.schedules import warmup_cosine_lr as warmup_cosine_lr
from zerojax.optim.schedules import warmup_decay_lr as warmup_decay_lr
from zerojax.optim.schedules import warmup_lr as warmup_lr
