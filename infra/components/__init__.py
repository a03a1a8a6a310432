"""The parts of the cluster as Pulumi components. `infra/__main__.py` puts them together."""

from infra.components.access import Access
from infra.components.compute import Compute
from infra.components.elastic import Elastic
from infra.components.network import Network
from infra.components.storage import Storage
from infra.components.watch import Watch

__all__ = ["Access", "Compute", "Elastic", "Network", "Storage", "Watch"]
