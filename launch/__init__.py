"""Control side of Loopworks: plans a run, starts it, watches it. Imports no torch."""
