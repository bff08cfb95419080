"""What a user may choose about a plan: ranks, and the few options that the definition leaves open.

Invariant: everything here is a flag of `truegate plan` and `truegate serve`; the rest of a plan follows from the law.
"""

from dataclasses import dataclass

from truegate.errors import Refused


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """world = tp * dp; tp is per attention replica; ep divides world; moe_tp = world / ep shards cut each expert."""

    tp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.dp

    @property
    def moe_tp(self) -> int:
        return self.world // self.ep

    def __post_init__(self) -> None:
        if min(self.tp, self.dp, self.ep) < 1:
            raise Refused(f"--tp {self.tp} --dp {self.dp} --ep {self.ep}: each must be at least 1")
        if self.world % self.ep:
            raise Refused(
                f"--ep {self.ep} does not divide the {self.world} ranks (tp {self.tp} x dp {self.dp}); "
                "use an --ep that does, or change --dp"
            )


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a user may choose about a plan; the rest follows."""

    ranks: Ranks = Ranks()
    fuse_shared: bool = False
    scale_at: str = "weights"  # or "output": multiply the sum by r once, after combine
    replicate_shared: bool = False  # compute a gathered row's shared slot on every rank instead of its home only
    weight_format: str | None = None  # checked against the kernel when known
