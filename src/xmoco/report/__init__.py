"""Turns a run folder, finished or interrupted, into something to see: curves, sheets, a page."""
