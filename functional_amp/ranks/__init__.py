"""A run on several ranks: the same step on torch's DeviceMesh, DTensor and collectives."""

from functional_amp.ranks.agree import stop_on as stop_on
from functional_amp.ranks.mesh import Ranks as Ranks
from functional_amp.ranks.shard import broadcast as broadcast
from functional_amp.ranks.shard import gather as gather
from functional_amp.ranks.shard import shard as shard
from functional_amp.ranks.shard import sharded as sharded
from functional_amp.ranks.windows import join_window as join_window
from functional_amp.ranks.windows import part_window as part_window
from functional_amp.ranks.windows import whole as whole
