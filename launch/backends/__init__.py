"""Backends: how the ranks of a plan are started. Each one builds a LaunchSpec with a pure function; `start` runs it."""
