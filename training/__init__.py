"""Node side of Loopworks: the recurrent-depth model, its data, its training loop and its evaluation.

Importing this package imports no torch: `training.config`, `training.errors` and `training.records` are also
used on the control side, which has to answer in a fraction of a second.
"""
