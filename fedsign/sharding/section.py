"""The configuration table [client.sharding]."""

from collections.abc import Iterable

from fedsign.errors import ConfigError
from fedsign.sections import NonNegativeReal, Positive, PositiveReal, Section
from fedsign.sharding.strategy import strategy_of
from fedsign.transport.addresses import Address

_WHERE_RANKS_ARE = frozenset({"machines", "listen", "secret_file", "join_s", "insecure_network"})


class ShardingSection(Section):
    """Processes that train one client together, with its model states sharded (`fedsign.sharding`); 1: no sharding.

    `auto` selects the strategy that the plan ranks first for these bandwidths and this memory.
    """

    no_result = _WHERE_RANKS_ARE | {"prefetch"}
    ranks: Positive = 1
    groups: Positive = 1  # equal groups of ranks with fast links
    strategy: str = "auto"  # or one of the fourteen, such as IIG
    memory_gb: NonNegativeReal = 0.0  # limit for a rank's model states; 0: none
    intra_gbps: PositiveReal = 2000.0  # Gbit/s within a group, and below between groups; the paper's values
    inter_gbps: PositiveReal = 80.0
    prefetch: bool = True  # overlap communication with computation, for the memory of one more unit
    machines: Positive = 1  # hold consecutive ranks; those after the first join it (`fedsign worker`)
    listen: str = ""  # HOST:PORT at which the other machines reach the first
    secret_file: str = ""  # shared by all machines; required unless HOST is the loopback
    join_s: PositiveReal = 120.0  # seconds to wait for machines to join
    # let ranks send unencrypted tensors over a network; required unless HOST is the loopback
    insecure_network: bool = False

    def check(self) -> None:
        """Check that ranks divide into equal groups, and both divide over the machines."""
        if self.ranks == 1:
            self._refuse_changed(type(self).model_fields, "ranks=1, which shards nothing; raise ranks")
            return
        if self.ranks % self.groups:
            raise ConfigError(
                f"client.sharding.groups={self.groups} was given with client.sharding.ranks={self.ranks}; "
                "groups are of one "
                "size: choose a divisor of ranks."
            )
        if self.strategy != "auto":
            strategy_of(self.strategy)
        if self.machines == 1:
            self._refuse_changed(_WHERE_RANKS_ARE, "machines=1, which no other one joins; raise machines")
            return
        for key in ("ranks", "groups"):
            number = getattr(self, key)
            if number % self.machines:
                raise ConfigError(
                    f"client.sharding.machines={self.machines} was given with client.sharding.{key}={number}; "
                    f"each machine holds as many ranks, in whole groups: choose {key} as a multiple of machines."
                )
        if self.listen:
            Address.of(self.listen, given_as="client.sharding.listen")

    def where_machines_join(self) -> tuple[Address, bytes]:
        """The address at which the first machine listens, and the shared secret.

        Raises:
            ConfigError: they are missing or unusable.
        """
        from fedsign.transport.handshake import read_key  # keeps reading a configuration fast

        if not self.listen:
            raise ConfigError(
                f"client.sharding.machines={self.machines} was given, but not where the first machine listens for the "
                "others; set client.sharding.listen=HOST:PORT, or at a node sharding-listen in its --node-config."
            )
        address = Address.of(self.listen, given_as="client.sharding.listen")
        given_as = "client.sharding.secret_file (a node's sharding-secret-file)"
        key = read_key(self.secret_file, is_loopback=address.is_loopback, given_as=given_as)
        if not (address.is_loopback or self.insecure_network):
            raise ConfigError(
                f"client.sharding.listen={address} was given, but between machines Gloo and NCCL send a client's "
                "tensors without "
                "encryption; set client.sharding.insecure_network=true (a node's sharding-insecure-network) where you "
                "trust the network."
            )
        return address, key

    def _refuse_changed(self, keys: Iterable[str], why: str) -> None:
        default = type(self)()
        given = [
            f"client.sharding.{key}={value}" for key, value in self if key in keys and value != getattr(default, key)
        ]
        if given:
            raise ConfigError(f"{', '.join(given)} was given with client.sharding.{why}, or leave it out.")
