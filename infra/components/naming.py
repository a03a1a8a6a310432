"""Names and tags: every resource carries the cluster, the owner and what it is for."""

from __future__ import annotations

from dataclasses import dataclass

from infra.config import ClusterConfig

CLUSTER_TAG = "loopworks:cluster"
ROLE_TAG = "loopworks:role"
DATA_TAG = "loopworks:data"


@dataclass(frozen=True)
class Naming:
    """Names and tags of one cluster."""

    cluster: str
    owner: str

    @classmethod
    def of(cls, config: ClusterConfig) -> Naming:
        """The naming of a configuration."""
        return cls(config.name, config.owner or "unknown")

    def name(self, part: str) -> str:
        """`CLUSTER-PART`."""
        return f"{self.cluster}-{part}"

    def tags(self, part: str, *, role: str = "", data: str = "") -> dict[str, str]:
        """Tags of a resource; `role` is head or gpu for instances, `data` is keep or disposable for what holds data."""
        tags = {"Name": self.name(part), CLUSTER_TAG: self.cluster, "Owner": self.owner, "ManagedBy": "pulumi"}
        if role:
            tags[ROLE_TAG] = role
        if data:
            tags[DATA_TAG] = data
        return tags
