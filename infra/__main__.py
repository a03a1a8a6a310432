"""The cluster, as Pulumi runs it: `cd infra && pulumi up`. Reads as a table of contents; each part is a component."""

from __future__ import annotations

import datetime as dt
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `infra` is importable from `cd infra`

from infra.components import Access, Compute, Elastic, Network, Storage, Watch
from infra.outputs import export_outputs
from infra.secrets_store import store_redis_password
from infra.stack import announce, checked_configuration

now = dt.datetime.now(dt.timezone.utc)
config, choice = checked_configuration(now)

network = Network(config, choice.zone)
access = Access(config, network)
storage = Storage(config, network, access)
compute = Compute(
    config, network, access, storage, gpu_image_id=choice.gpu_image_id, head_image_id=choice.head_image_id
)
elastic = (
    Elastic(config, network, access, compute, image_id=choice.gpu_image_id, now=now) if config.elastic_max else None
)
if config.alert_emails:
    Watch(config, network, compute)
redis_parameter = store_redis_password(config, access)

export_outputs(config, network, access, storage, compute, elastic, redis_parameter=redis_parameter)
announce(config)
