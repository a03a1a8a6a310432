"""Checkpoints: staged, hashed, committed by a marker, uploaded the same way, resumed from the newest that verifies.

Torch-free modules (used by the control side too): layout, verify, catalog, policy, remote, upload, names, errors.
Modules that import torch: snapshot, engine_io, universal, saver, resume, export.
"""
