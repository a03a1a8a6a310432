"""Data: from raw text to verified token shards, and back into the training loop in a repeatable order.

Importing this package imports no torch; only `training.data.loader` does.
"""

from training.data.dataset import TokenDataset, open_dataset
from training.data.manifest import Manifest, read_manifest
from training.data.mixture import Mixture, open_data
from training.data.order import Cursor, sample

__all__ = ["Cursor", "Manifest", "Mixture", "TokenDataset", "open_data", "open_dataset", "read_manifest", "sample"]
