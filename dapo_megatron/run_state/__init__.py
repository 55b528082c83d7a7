"""Saving a run and continuing it."""
