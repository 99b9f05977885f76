"""Settings to refuse with sharded clients; the rules are imported only if sharding is chosen."""

from fedsign.compatibility import Experiment
from fedsign.rules import Choice
from fedsign.sharding.section import ShardingSection

SHARDING = Choice[Experiment](
    made=lambda experiment: ShardingSection.of(experiment.config).ranks > 1,
    given="client.sharding.ranks={config.client.sharding.ranks} was given, but",
    rules="clients.sharding.trial:RULES",
)
RULES = (SHARDING,)
