"""Benchmarks: one folder or file for each subject, run as `python -m benchmarks.NAME`."""
